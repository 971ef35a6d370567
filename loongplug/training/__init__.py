"""From a command line to a training run: arguments, model configs, the table of start-up rules, and
the providers and forward step that megatron.training calls. Nothing here defines layers, reads
samples or touches a device; that belongs to models, data and platform.
"""
