"""Model families: encoders, projectors, text decoders, their composition, their config classes, the
table of each family's Hugging Face names, and the registry of families. Models know Megatron's
modules and the shape of a microbatch, but nothing of command lines, data sets, the reading and
writing of checkpoints, or the training loop.
"""
