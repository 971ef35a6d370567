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


def main(argv: list[str] | None = None) -> None:
    """Run training with ``argv`` (default: the command line). Every rank enters."""
    from loongplug.parallel.failure import failure_board
    from loongplug.platform import activate
    from loongplug.training.flags import requested_device

    argv = sys.argv[1:] if argv is None else argv
    with failure_board():
        if activate(requested_device(argv)).name == "cpu":
            # Megatron warns, on every rank, of each CUDA library that a CPU run does without.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
        from loongplug.training.run import run

        run(argv)


if __name__ == "__main__":
    main()
