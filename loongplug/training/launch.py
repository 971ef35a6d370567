"""``loongplug train``: torchrun on this machine, for a run of one machine."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from loongplug.parallel.programs import ranks_command
from loongplug.platform import requested_device
from loongplug.training.early import check_early


def launch(flags: Sequence[str], *, ranks: int | None) -> NoReturn:
    """Become LoongPlug's torchrun, with ``ranks`` processes of ``loongplug.train``.

    Without ``ranks``, one for each GPU that the run will use, or one. This process is replaced,
    so that signals and the exit code are torchrun's. ``--help-all`` needs no ranks.

    Raises:
        ValueError: a flag, a device or a key of the model's YAML that there is not.
    """
    train = ("-m", "loongplug.train", *flags)
    if "--help-all" in flags:
        os.execv(sys.executable, [sys.executable, *train])
    on_cpu = requested_device(flags) == "cpu"
    number = 1 if ranks is None and on_cpu else ranks
    check_early(flags, ranks=number, becomes_another=True)
    if not number:
        import torch

        number = max(1, torch.cuda.device_count())
    os.execv(sys.executable, ranks_command(*train, ranks=number))
