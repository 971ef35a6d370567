"""Weights in and out: Hugging Face folders by one declarative mapping, and guards on checkpoints.

Here live the pure mapping (:mod:`hf_mapping`), import, gathering and export over all ranks, and
the check that a Megatron checkpoint belongs to the model at hand. The table of a model family's
names lives with that family. Saving and resuming a run stays Megatron's ``torch_dist``, and no
pickle is ever read.
"""
