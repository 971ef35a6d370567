"""One process of a conversion: ``torchrun ... -m loongplug.convert.worker FLAGS``."""

import sys

from loongplug.train import started


def main() -> None:
    """Convert as the command line says. Every rank enters."""
    flags = sys.argv[1:]
    with started(flags):
        from loongplug.convert.rank import convert

        convert(flags)


if __name__ == "__main__":
    main()
