"""Which layers go to which pipeline stage: ``loongplug partition``.

Layers are weighed by what they do in a step (``costs.py``): what is frozen has less of a backward,
or none. An exact search splits them into stages (``stages.py``), and a clock of 1F1B (``clock.py``)
tells how long a step takes with that split, beside one that knows nothing of what is frozen. It
stands above ``estimate``, whose microbatches and order of passes it uses.
"""
