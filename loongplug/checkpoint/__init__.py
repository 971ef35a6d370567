"""Weights in and out: Hugging Face folders by a family's mapping, and guards on checkpoints.

Here live import, gathering and export over all ranks, and what surrounds Megatron's own
``torch_dist`` checkpoints: they appear whole, and belong to the model at hand. The mapping's own
language (:mod:`loongplug.models.hf_mapping`) and the table of a family's names live with the
models, which import nothing from here. Writing and reading a run's state stays Megatron's, and no
pickle is read that could run code.
"""
