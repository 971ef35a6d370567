"""The ranks of a conversion on this machine, ``-m loongplug.convert.worker FLAGS`` each."""

import subprocess
import sys
from collections.abc import Sequence

from loongplug.parallel.rank_programs import ranks_command


def convert(flags: Sequence[str], *, ranks: int) -> None:
    """Convert on ``ranks`` processes with ``flags``."""
    # What weights pass through is the host's memory.
    worker = ("-m", "loongplug.convert.worker", "--device", "cpu")
    command = ranks_command(*worker, *flags, ranks=ranks)
    ended = subprocess.run(command, check=False)
    if ended.returncode != 0:
        raise ValueError(f"the conversion ended with exit code {ended.returncode}")


def main() -> None:
    """One rank: convert as the command line says. Every rank enters."""
    from loongplug.train import started

    flags = sys.argv[1:]
    with started(flags) as at_end:
        from loongplug.convert.rank import convert as convert_rank

        convert_rank(flags, at_end=at_end)


if __name__ == "__main__":
    main()
