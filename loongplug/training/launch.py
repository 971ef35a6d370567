"""``loongplug train``: torchrun on this machine, for a run of one machine."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from loongplug.parallel.programs import ranks_command
from loongplug.platform import requested_device


def launch(flags: Sequence[str], *, ranks: int | None) -> NoReturn:
    """Become LoongPlug's torchrun, with ``ranks`` processes of ``loongplug.train``.

    Without ``ranks``, one for each GPU that the run will use, or one. This process is replaced,
    so that signals and the exit code are torchrun's. ``--help`` needs no ranks.

    Raises:
        ValueError: ``--device`` names no device.
    """
    train = ("-m", "loongplug.train", *flags)
    if {"--help", "-h"} & {*flags}:
        os.execv(sys.executable, [sys.executable, *train])
    number = _devices(flags) if ranks is None else ranks
    os.execv(sys.executable, ranks_command(*train, ranks=number))


def _devices(flags: Sequence[str]) -> int:
    if requested_device(flags) == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())
