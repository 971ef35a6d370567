"""Weights from one format to another without training: ``loongplug convert``.

It stands above training, whose flags, checks and model provider it uses; nothing else imports it.
"""
