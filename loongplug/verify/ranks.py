"""Ranks as forked processes, which start with everything that the parent has imported."""

import ctypes
import gc
import math
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from loongplug.platform.loopback import own_address
from loongplug.platform.uninterrupted_forks import signals_wait

if TYPE_CHECKING:
    from loongplug.platform.platforms import Platform

GRACE_SECONDS = 5.0  # for the others to end by themselves when a rank has failed
_POLL_SECONDS = 0.01
_LOG_LINES = 30

OnEvent = Callable[[str], None]


class RankError(RuntimeError):
    """A rank ended without a result; the message has what it said last."""


@dataclass
class Rank:
    """A forked process, as its parent sees it; what it leaves and prints is in ``folder``."""

    number: int
    pid: int
    folder: Path
    code: int | None = None  # as os.waitstatus_to_exitcode gives it
    killed: bool = False  # by the parent
    report: dict[str, Any] | None = None  # a result, or an error with the time it was raised at

    def ended(self, *, block: bool = False) -> bool:
        """Whether it is gone; then its report is there, if it left one."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, 0 if block else os.WNOHANG)
            if pid == 0:
                return False
            self.code = os.waitstatus_to_exitcode(status)
            path = self.folder / f"{self.number}.pickle"
            self.report = pickle.loads(path.read_bytes()) if path.is_file() else None
        return True

    def kill(self) -> None:
        """End it, and the processes that it started (its process group)."""
        self.killed = self.killed or self.code is None
        for target in (-self.pid, self.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(target, signal.SIGKILL)

    @property
    def fault(self) -> str | None:
        """What went wrong, as seen after its end; None when it gave its result."""
        if self.report is not None:
            return self.report.get("error")
        if self.killed:
            return "was still running and was stopped"
        assert self.code is not None
        if self.code < 0:
            return f"was killed by signal {signal.Signals(-self.code).name}"
        return f"exited with code {self.code} and returned nothing"

    @property
    def failed_at(self) -> tuple[bool, float]:
        """Sorts ranks by when they failed; those that left no time come before those stopped."""
        return (self.killed, -math.inf) if self.report is None else (False, self.report["time"])

    @property
    def printed(self) -> list[str]:
        """The lines it printed."""
        log = self.folder / f"rank_{self.number}.log"
        return log.read_text(errors="replace").splitlines() if log.is_file() else []


def new_folder(folder: Path) -> Path:
    """Make ``folder`` for a run's recording; nothing that is in one already is removed for it.

    Raises:
        ValueError: there is something in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder.")
    return folder


def run_ranks(
    function: Callable[[int, OnEvent], Any],
    world_size: int,
    *,
    folder: Path,
    on_event: OnEvent = lambda line: None,
    timeout: float | None = None,
) -> list[Any]:
    """``[function(rank, tell) for rank in range(world_size)]``, each in a process of its own.

    What ranks are given and leave behind is as for :func:`fork_ranks`.

    Raises:
        ValueError: a rank raised one; the user's to mend.
        RankError: a rank raised something else, died, or ``timeout`` seconds have passed.
    """
    return _results(
        fork_ranks(function, world_size, folder=folder, on_event=on_event, timeout=timeout)
    )


def fork_ranks(
    function: Callable[[int, OnEvent], Any],
    world_size: int,
    *,
    folder: Path,
    on_event: OnEvent = lambda line: None,
    timeout: float | None = None,
    grace: float = GRACE_SECONDS,
    on_timeout: Callable[[list[Rank]], None] = lambda alive: None,
) -> list[Rank]:
    """Run ``function(rank, tell)`` in a forked process for each rank; they have ended afterwards.

    RANK, LOCAL_RANK and WORLD_SIZE are set there; a process group is the function's to make.
    ``tell`` hands one line to ``on_event`` here. What a rank prints goes to
    ``folder/rank_<n>.log``. Results have to be picklable.

    Args:
        grace: seconds that the others have to end by themselves when a rank has failed.
        on_timeout: called with the ranks that still run after ``timeout``, before they are ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    ranks: list[Rank] = []
    address = own_address(f"{os.getpid()} {folder}")
    try:
        for number in range(world_size):
            (folder / f"{number}.pickle").unlink(missing_ok=True)
            with signals_wait() as as_before:
                pid = os.fork()
                if pid == 0:
                    as_before()
                    os.close(reading)
                    os.environ.update(address)
                    _live(function, number, world_size=world_size, folder=folder, events=writing)
                ranks.append(Rank(number, pid, folder))
        deadline = None if timeout is None else time.monotonic() + timeout
        on_timeout(_wait(ranks, reading, on_event=on_event, deadline=deadline, grace=grace))
    finally:
        os.close(reading)
        os.close(writing)
        for rank in ranks:
            rank.kill()
            rank.ended(block=True)
    return ranks


def join(rank: int, *, folder: Path, device: str, minutes: float) -> "Platform":
    """Make this process a rank of the default group, which meets in ``folder``.

    Collectives give up after ``minutes``. WORLD_SIZE is as :func:`run_ranks` sets it.
    """
    import torch.distributed as dist

    from loongplug.platform import activate

    platform = activate(device)
    if device == "cpu":
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    else:
        import torch

        torch.cuda.set_device(rank)
    dist.init_process_group(
        platform.backend,
        init_method=f"file://{folder.resolve()}/store",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=minutes),
    )
    return platform


def _wait(
    ranks: list[Rank], events: int, *, on_event: OnEvent, deadline: float | None, grace: float
) -> list[Rank]:
    """Until all have ended, or a while after one failed; those that the deadline found running."""
    failed: float | None = None
    while True:
        alive = [rank for rank in ranks if not rank.ended()]
        for line in _lines(events):
            on_event(line)
        if not alive:
            return []
        now = time.monotonic()
        if failed is None and any(rank.code not in (None, 0) for rank in ranks):
            failed = now
        if failed is not None and now > failed + grace:
            return []
        if deadline is not None and now > deadline:
            return alive if failed is None else []
        time.sleep(_POLL_SECONDS)


def _lines(events: int) -> list[str]:
    """What was told since the last time; lines are short, and so written whole."""
    try:
        return os.read(events, 65536).decode().splitlines()
    except BlockingIOError:
        return []


def failed_ranks(ranks: list[Rank]) -> list[Rank]:
    """Those that failed, the cause first; what its peers say is mostly that it is gone."""
    return sorted((r for r in ranks if r.fault is not None), key=lambda rank: rank.failed_at)


def _results(ranks: list[Rank]) -> list[Any]:
    for rank in failed_ranks(ranks):
        if rank.report is not None and rank.report["user"]:
            raise ValueError(rank.report["message"])
        said = f"rank {rank.number} failed:\n{rank.fault}".rstrip()
        if rank.report is None:
            said = "\n".join((f"{said}; it printed last:", *rank.printed[-_LOG_LINES:]))
        raise RankError(said)
    return [rank.report["result"] for rank in ranks if rank.report is not None]


def _live(
    function: Callable[[int, OnEvent], Any],
    rank: int,
    *,
    world_size: int,
    folder: Path,
    events: int,
) -> NoReturn:
    """The life of a rank; it never returns into the code that it was forked from."""
    code = 1
    try:
        _own_process(rank, world_size=world_size, folder=folder)
        try:
            result = function(rank, lambda line: _tell(events, line))
            _leave(folder, rank, {"result": result})
            code = 0
        except BaseException as error:
            _leave(folder, rank, _failure(error))
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _own_process(rank: int, *, world_size: int, folder: Path) -> None:
    """Give a rank a process group, output and environment; it ends when the parent does."""
    gc.freeze()  # to look through what the parent has made would copy all of its pages
    os.setpgid(0, 0)
    with suppress(OSError, AttributeError):  # Linux only
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    own_thread_pool()


def own_thread_pool() -> None:
    """Make torch's pool of threads again, now that this process has one thread.

    The first to look at it after a fork makes it again, without a lock (caffe2's pthreadpool).
    Threads of autograd look when they start, several at a time: two of them end the process.
    Does nothing where torch has not been imported.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads())


def _tell(events: int, line: str) -> None:
    with suppress(OSError):
        os.write(events, f"{line}\n".encode())


def _failure(error: BaseException) -> dict[str, Any]:
    stopped = isinstance(error, SystemExit) and error.code not in (None, 0)
    return {
        "error": traceback.format_exc(),
        "message": str(error),
        "user": isinstance(error, ValueError) or stopped,
        "time": time.monotonic(),
    }


def _leave(folder: Path, rank: int, report: dict[str, Any]) -> None:
    """Write the report whole or not at all."""
    part = folder / f"{rank}.part"
    part.write_bytes(pickle.dumps(report))
    part.rename(folder / f"{rank}.pickle")
