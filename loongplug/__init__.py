"""LoongPlug: training of multimodal models as a plugin for stock Megatron-Core.

Here live the entries, ``train.py`` for torchrun and ``cli.py`` for people, and where configs are
found. Everything else is in a folder of its own, and imports between folders point one way:
``bench`` > ``training``, ``evaluate`` > ``checkpoint`` > ``models`` > ``data`` > ``parallel``,
``platform``. Importing this package imports nothing heavy.
"""

import os

try:
    os.getcwd()
except FileNotFoundError:  # of which libraries would say that they are not installed
    raise SystemExit("loongplug: error: the working directory is gone: cd to another one") from None
