"""Before the ranks of a run start: the check of its command line, and ``loongplug train``."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NoReturn

from loongplug.parallel.rank_programs import ranks_command
from loongplug.platform import requested_device
from loongplug.platform.upstream_flags import add_upstream_flags, is_tested
from loongplug.platform.without_torch import transformers_without_torch
from loongplug.training.flags import own_parser, take_apart


def launch(flags: Sequence[str], *, ranks: int | None) -> NoReturn:
    """Become LoongPlug's torchrun, with ``ranks`` processes of ``loongplug.train``.

    Without ``ranks``, one for each GPU that the run will use, or one. This process is replaced,
    so that signals and the exit code are torchrun's. ``--help-all`` needs no ranks.
    """
    train = ("-m", "loongplug.train", *flags)
    if "--help-all" in flags:
        os.execv(sys.executable, [sys.executable, *train])
    on_cpu = requested_device(flags) == "cpu"
    number = 1 if ranks is None and on_cpu else ranks
    check_before_torch(flags, ranks=number, becomes_another=True)
    if not number:
        import torch

        number = max(1, torch.cuda.device_count())
    os.execv(sys.executable, ranks_command(*train, ranks=number))


def check_before_torch(
    flags: Sequence[str], *, ranks: int | None = None, becomes_another: bool = False
) -> None:
    """Raise ValueError for flags and keys of the model's YAML that there are not.

    All is left to the run's own check where Megatron-Core is not the tested version. Keys beside a
    Hugging Face folder are checked where this process ``becomes_another``, for it could have no
    model any more. ``ranks`` are the run's, if known. ``--help`` prints and raises SystemExit.
    """
    parser = own_parser()
    if {"-h", "--help"} & {*flags}:
        parser.parse_args(["--help"])
    if "--help-all" in flags or not is_tested("megatron-core"):
        return
    add_upstream_flags(parser)
    args, _, overrides = take_apart(flags, parser, ranks=ranks)
    of_folder = args.load_hf and overrides and becomes_another
    if args.trusted_packages or args.load_lora:  # which may import anything, or have some keys
        return
    if args.model_name or args.config_file or of_folder:
        with transformers_without_torch() if of_folder else nullcontext():
            from loongplug.training.config import compose_asked_for

            compose_asked_for(args, overrides=overrides)
