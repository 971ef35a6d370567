"""Weights in and out: Hugging Face folders by a family's mapping, and guards on checkpoints.

Here live import, gathering and export over all ranks, and the check that a Megatron checkpoint
belongs to the model at hand. The mapping's own language (:mod:`loongplug.models.hf_mapping`) and
the table of a family's names live with the models, which import nothing from here. Saving and
resuming a run stays Megatron's ``torch_dist``, and no pickle is ever read.
"""
