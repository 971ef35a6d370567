"""``loongplug verify``: does a layout compute the training step that a single rank computes?

Two runs through training's own entry are recorded and compared: the layout's, and that of one rank
on the same weights and samples.
"""
