"""Train a multimodal model: ``torchrun ... loongplug/train.py FLAGS`` (or ``-m loongplug.train``).

This file only chooses the platform, which has to happen before Megatron is imported, and sees to
it that an error on one rank ends all of them.
"""

import os
import sys

# Started by path, this file's folder heads sys.path, and its ``platform`` folder would stand in
# for the standard library's module of that name.
if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def started(flags: Sequence[str]) -> Iterator[None]:
    """Around a rank's main: the platform that ``flags`` ask for; a failure ends all ranks."""
    from loongplug.parallel.failure import failure_board

    # Megatron wants it on Hopper and before; CUDA reads it when it starts, so it is set first.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with failure_board():
        from loongplug.platform import activate
        from loongplug.training.flags import requested_device

        if activate(requested_device(flags)).name == "cpu":
            # Megatron warns, on every rank, of each CUDA library that a CPU run does without.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
        yield


def main(flags: Sequence[str] | None = None) -> None:
    """Run training with ``flags`` (default: the command line). Every rank enters."""
    flags = sys.argv[1:] if flags is None else flags
    with started(flags):
        from loongplug.training.run import run

        run(flags)


if __name__ == "__main__":
    main()
