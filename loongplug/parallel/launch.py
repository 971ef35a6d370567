"""torchrun for our own commands, without a traceback of its own behind what ranks have said.

``python -m loongplug.parallel.launch`` takes torchrun's command line, and ends with the code of the
rank that failed first. On CPUs, the ranks of one machine are forked from one process that has
imported what they need. Without that, 4 ranks on 2 cores spend 20 seconds on the same imports.
"""

import logging
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

from loongplug.parallel import exit_notes
from loongplug.parallel.rank_programs import ALONE, program_of
from loongplug.platform.uninterrupted_forks import signals_wait

# What the process that ranks are forked from imports for them.
_PRELOADED = "loongplug.preloaded"
_PORT = "give --master-port, or --rdzv-endpoint, with a port that is free on its machine"


def _stays(record: logging.LogRecord, *, endings_in: Path) -> bool:
    """Whether torchrun's line on a failed rank stays: no rank has said why it failed."""
    record.exc_info = None  # a traceback would be torchrun's own
    return exit_notes.failed_code(endings_in) is None


def main() -> None:
    """Start the ranks and wait for their end; say which rank was killed, as it cannot say so."""
    program = program_of(sys.argv[1:])
    if program is not None and program.alone:
        os.environ.update(ALONE)
        sys.argv = [program.path, *program.flags]
        runpy.run_path(program.path, run_name="__main__")
        return
    with tempfile.TemporaryDirectory(prefix="loongplug-exits-") as folder:
        # Before there is what ranks are forked from.
        os.environ[exit_notes.FOLDER_VARIABLE] = folder
        if program is not None and program.can_be_forked:
            sys.argv[1:] = program.forked()
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun, but before torch is there
            multiprocessing.set_forkserver_preload([_PRELOADED])
            with signals_wait():
                forkserver.ensure_running()  # imports beside us
        sys.exit(_torchrun(endings_in=Path(folder)))


def _torchrun(*, endings_in: Path) -> int:
    """Torchrun by the command line; the code to end with."""
    # Here, and not above: the import of this module alone takes no torch.
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.run import main as torchrun

    # torchrun copies the ranks' reasons to this file for the program that started it, and complains
    # without one. It removes what is there first.
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(endings_in / "error.json")
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        partial(_stays, endings_in=endings_in)
    )
    for context in (api.MultiprocessContext, api.SubprocessContext):
        # A signal waits: what has started when it comes, torchrun ends.
        context._start = signals_wait()(context._start)  # type: ignore[method-assign]
    try:
        torchrun()
    except (DistNetworkError, RendezvousConnectionError) as error:
        reason = str(error.__cause__ or error)
        print(f"loongplug: error: no store for ranks ({reason}): {_PORT}", file=sys.stderr)
        return 1
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            name = failure.signal_name()
            if failure.exitcode < 0 and name != "SIGTERM":  # which torchrun sends itself
                print(f"loongplug: rank {rank} was ended by {name}", file=sys.stderr)
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except api.SignalException as ended:
        return _told_to_end(endings_in, by=ended.sigval)
    return 0


def _told_to_end(folder: Path, *, by: int) -> int:
    """The code of a launcher that a signal has ended, once no rank is left.

    Ranks save first; the signal's code says that all have.
    """
    killed = exit_notes.killed_ranks(folder)
    for rank in killed:
        print(f"loongplug: rank {rank} was killed before it had saved", file=sys.stderr)
    code = exit_notes.failed_code(folder)
    if code is not None:
        return code
    return 128 + (signal.SIGKILL if killed else by)


if __name__ == "__main__":
    main()
