"""torchrun for our own commands, without a traceback of its own behind what ranks have said.

``python -m loongplug.parallel.launch`` takes torchrun's command line, and ends with the code of the
rank that failed first.
"""

import os
import sys


def ranks_command(*program: str, ranks: int) -> list[str]:
    """What starts ``ranks`` processes of a program (``-m``, its module, its words) here."""
    launcher = ("-m", "loongplug.parallel.launch", "--standalone", f"--nproc-per-node={ranks}")
    return [sys.executable, *launcher, *program]


def main() -> None:
    """Start the ranks and wait for their end. A rank that was killed could not say so itself."""
    # Whoever only asks for the command does without torch.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # Where torchrun copies the ranks' reasons to, for what has started it; without, it complains.
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.devnull
    try:
        torchrun()
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            name = failure.signal_name()
            if failure.exitcode < 0 and name != "SIGTERM":  # which torchrun sends itself
                print(f"loongplug: rank {rank} was ended by {name}", file=sys.stderr)
        _, first = error.get_first_failure()
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)
    except SignalException as ended:
        sys.exit(128 + ended.sigval)


if __name__ == "__main__":
    main()
