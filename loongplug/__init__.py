"""LoongPlug: training of multimodal models as a plugin for stock Megatron-Core.

Here are the entries, ``train.py`` for torchrun and ``cli.py`` for people. Imports between folders
point one way (docs/architecture.md). Importing this package imports nothing heavy.
"""

import os

try:
    os.getcwd()
except FileNotFoundError:  # of which libraries would say that they are not installed
    raise SystemExit("loongplug: error: the working directory is gone: cd to another one") from None
