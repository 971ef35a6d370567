"""Start the ranks of a conversion on this machine."""

import subprocess
import sys
from collections.abc import Sequence


def convert(flags: Sequence[str], *, ranks: int) -> None:
    """Run ``loongplug.convert.worker`` on ``ranks`` processes with ``flags``.

    Raises:
        ValueError: a rank failed; its own message has been printed by then.
    """
    command = [
        sys.executable,
        *("-m", "loongplug.parallel.launch", "--standalone", f"--nproc-per-node={ranks}"),
        *("-m", "loongplug.convert.worker", *flags),
    ]
    ended = subprocess.run(command, check=False)
    if ended.returncode != 0:
        raise ValueError(f"the conversion ended with exit code {ended.returncode}")
