"""What spans ranks: layouts, every module's parallel state, and errors that reach every rank.

Nothing here knows what a model computes or where data come from; it may ask
``loongplug.platform`` and torch.distributed, and nothing above.
"""
