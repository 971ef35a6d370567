"""Which layers go to which pipeline stage: ``loongplug partition``.

Layers are weighed by what they do in a step: what is frozen has less of a backward, or none
(``splits.py``). An exact search splits them into stages (``stages.py``), and a clock of 1F1B tells
how long a step takes with that split, beside one that knows nothing of what is frozen
(``clock.py``). It stands above ``estimate``, whose microbatches and order of passes it uses.
"""
