"""``loongplug/train.py`` in which one rank is killed: for torchrun, with the flags of the run.

FUZZ_KILL is ``rank step``; it happens in the first attempt only. FUZZ_LOSSES is a file to which
the first rank of every attempt adds a line: the attempt, and the losses that it has reported.
"""

import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """As ``loongplug.train.main``."""
    from loongplug.train import started

    flags = sys.argv[1:]
    with started(flags):
        from loongplug.training.run import run

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        rank = int(os.environ["RANK"])
        victim, step = map(int, os.environ["FUZZ_KILL"].split())
        losses = Path(os.environ["FUZZ_LOSSES"])

        if attempt == 0 and rank == victim:
            from loongplug.data.loader import MicrobatchLoader

            following = MicrobatchLoader.__next__
            taken = 0

            def killed(self):
                nonlocal taken
                if taken == (step - 1) * 4:  # of two samples each
                    os.kill(os.getpid(), signal.SIGKILL)
                taken += 1
                return following(self)

            MicrobatchLoader.__next__ = killed

        def note(report) -> None:
            if rank == 0:
                with losses.open("a") as file:
                    file.write(json.dumps([attempt, report.iteration, report.loss]) + "\n")

        run(flags, on_report=note)


if __name__ == "__main__":
    main()
