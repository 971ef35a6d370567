"""Train a multimodal model: ``torchrun ... loongplug/train.py FLAGS`` (or ``-m loongplug.train``).

Started without torchrun, it is a single rank, or one of those that Slurm, MPI, or RANK and
WORLD_SIZE tell of. This file only chooses the platform, which has to happen before Megatron is
imported, and sees to it that an error on one rank ends all of them.
"""

import os
import sys

# Started by path, this file's folder heads sys.path, and its ``platform`` folder would stand in
# for the standard library's module of that name.
if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]

import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loongplug.parallel.failure import AtEnd

# What starters call a rank's number.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")


@contextmanager
def started(flags: Sequence[str]) -> Iterator["AtEnd"]:
    """Around a rank's main: the platform that ``flags`` ask for; a failure ends all ranks.

    Gives what takes functions to call where another rank's failure ends this one.
    """
    with _ctrl_c_is_silent():
        from loongplug.parallel.failure import failure_board
    # Megatron wants it on Hopper and before; CUDA reads it when it starts, so it is set first.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with failure_board() as at_end:
        from loongplug.parallel.rank_programs import ALONE
        from loongplug.parallel.rendezvous import served_store
        from loongplug.platform import activate, choose_device, requested_device

        device = choose_device(requested_device(flags))
        _store = served_store(on_gpus=device == "cuda")  # as long as we are here
        if os.environ.get("WORLD_SIZE", "1") == "1":
            os.environ |= {**ALONE, **os.environ}
        quiet()
        activate(device)
        yield at_end


@contextmanager
def _ctrl_c_is_silent() -> Iterator[None]:
    """While torch is imported; later, Ctrl-C ends all ranks with one line."""
    as_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if as_usual:  # else, it is ignored or somebody's
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if as_usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def quiet() -> None:
    """Leave out what libraries say to those who write code, on every rank.

    Megatron warns of each CUDA library that it does without; ``loongplug doctor`` says which.
    """
    for module in (r"megatron\.", r"torch\.distributed\.checkpoint\b"):
        warnings.filterwarnings("ignore", category=UserWarning, module=module)
    for library in ("torch", "megatron", "transformers"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{library}\b")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=rf"{library}\b")


def main(flags: Sequence[str] | None = None) -> None:
    """Run training with ``flags`` (default: the command line). Every rank enters."""
    flags = sys.argv[1:] if flags is None else flags
    if not {*_RANKS} & {*os.environ}:  # else its starter has imported torch, or has checked
        from loongplug.training.launch import check_before_torch

        try:
            check_before_torch(flags, ranks=1)
        except ValueError as error:
            sys.exit(f"loongplug: error: {error}")
    with started(flags) as at_end:
        from loongplug.training.run import run

        run(flags, without_save="log", at_end=at_end)


if __name__ == "__main__":
    main()
