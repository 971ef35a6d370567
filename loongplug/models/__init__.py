"""Model families: encoders, projectors, text decoders, their composition, their config classes, and
the registry that names them. Models know Megatron's modules and the shape of a microbatch, but
nothing of command lines, datasets, checkpoints or the training loop.
"""
