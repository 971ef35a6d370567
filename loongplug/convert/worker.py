"""One process of a conversion: ``torchrun ... -m loongplug.convert.worker FLAGS``."""

import sys

from loongplug.train import started


def main() -> None:
    """Convert as the command line says. Every rank enters."""
    flags = ["--device", "cpu", *sys.argv[1:]]  # what weights pass through is the host's memory
    with started(flags) as at_end:
        from loongplug.convert.rank import convert

        convert(flags, at_end=at_end)


if __name__ == "__main__":
    main()
