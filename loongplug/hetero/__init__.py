"""Who encodes which unit, how features travel, and when: the three choices behind every mode.

A *unit* is the vision input of one microbatch. ``placement.py`` says which ranks encode and who
consumes, ``row_moves.py`` and ``exchange.py`` how features come to the decoder and gradients back,
``policies.py`` when: from a step to its plan, a list of ``operations.py`` at events of the
decoder's schedule. ``executor.py`` does them. ``modes.py`` alone knows what the modes are called.
The decoder asks a feature source and knows of none of this.
"""
