"""Who encodes which unit, how features travel, and when: the three choices behind every mode.

A *unit* is the vision input of one microbatch. ``placement.py`` says which ranks encode and who
consumes (assignment), ``row_moves.py`` and ``exchange.py`` how features come to the decoder and
gradients back (exchange), ``policies.py`` when (policy): from a step to its plan, a list of
``operations.py`` at events of the decoder's schedule. ``executor.py`` does them; the estimate adds
up their bytes. ``modes.py`` alone knows what the modes are called. The decoder asks a feature
source and knows of none of this. What lives here knows units, ranks and tensors; it builds no
layers and reads no files.
"""
