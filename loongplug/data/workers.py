"""Work ahead of its use, in forked processes, and a cache of what was made.

Not by concurrent.futures' own pool: it waits for its jobs when the interpreter exits and, for
ever, for the rest of a result whose process was killed as it sent it.
"""

import atexit
import gc
import os
import signal
import sys
import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from queue import PriorityQueue

from rich.console import Console
from rich.progress import Progress

from loongplug.platform.uninterrupted_forks import signals_wait

_ROWS = 32  # of map_rows, at a time
_FROZEN_FROM_THE_START = gc.get_freeze_count()  # Python's own


class ProcessDiedError(RuntimeError):
    """A background process was killed, mostly for lack of memory."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How much of a stream runs ahead: ``processes * depth`` results at most wait for their use.

    No media are begun while those that wait come to more than ``most_bytes``. Without processes,
    each result is made when it is asked for. ``pin_memory``: results are in page-locked memory.
    """

    processes: int = 0
    depth: int = 16  # so that steps of a few microbatches find their media made
    pin_memory: bool = False
    most_bytes: int = 512 * 2**20


IN_PROCESS = WorkerSettings()


class Pool[Job, Made]:
    """Makes results of jobs in forked processes or, without some, here when they are asked for.

    They are forked at the first job, and keep ``make`` and its caches as their own. A ValueError
    stays one; anything else becomes a RuntimeError, and of a dead process a ProcessDiedError.
    """

    def __init__(self, make: Callable[[Job], Made], *, settings: WorkerSettings) -> None:
        self.settings = settings
        self._make = make
        # What is wanted soon, then in the order of their numbers, so that no jobs are compared.
        self._jobs: PriorityQueue[tuple[bool, int, tuple[Job, Future[Made]] | None]]
        self._jobs, self._numbers = PriorityQueue(), count()
        self._processes: list[ForkProcess] = []
        self.over: Exception | None = None

    def submit(self, job: Job, *, soon: bool = False) -> Future[Made]:
        """Begin a job, ``soon`` before others, or leave it to whoever asks for its result first."""
        if self.settings.processes == 0:
            return _Late(partial(self._make, job))
        if self.over is not None:
            raise self.over
        if not self._processes:
            self._fork()
        work = Future[Made]()
        self._jobs.put((not soon, next(self._numbers), (job, work)))
        return work

    def ordered(self, jobs: Iterator[Job]) -> "Ordered[Job, Made]":
        """The results of ``jobs`` in their order, taken here as far ahead as settings allow."""
        return Ordered(self, jobs)

    def close(self) -> None:
        """End the processes; nothing more can be asked for."""
        atexit.unregister(self.close)
        self._end(RuntimeError("This pool of data loading processes is closed."))
        for process in self._processes:
            self._jobs.put((False, next(self._numbers), None))
            process.join()

    def _fork(self) -> None:
        context, connections = get_context("fork"), []
        with garbage_stays_here(), signals_wait():
            for _ in range(self.settings.processes):
                here, there = context.Pipe()
                process = context.Process(target=_work, args=(self._make, there), daemon=True)
                process.start()
                there.close()  # else its end would not show here
                self._processes.append(process)
                connections.append(here)
            for each in zip(self._processes, connections, strict=True):
                threading.Thread(target=self._speak, args=each, daemon=True).start()
            atexit.register(self.close)  # else they get SIGTERM, which training does not end by

    def _speak(self, process: ForkProcess, connection: Connection) -> None:
        """Have one process make what is asked for."""
        while (given := self._jobs.get()[-1]) is not None:
            job, work = given
            if not work.set_running_or_notify_cancel():
                continue
            try:
                if self.over is not None:
                    raise self.over
                connection.send(job)
                made, error = connection.recv()
                if error is not None:
                    raise error
                pinned = self.settings.pin_memory and hasattr(made, "pin_memory")
                work.set_result(made.pin_memory() if pinned else made)
            # OSError also of asking a process for the memory of a result, when it is dead by then.
            except (OSError, EOFError) as ended:
                process.join(1.0)
                # Not what the pipe said: "reset by peer" is read as the word of another rank.
                how = ended if process.exitcode is None else f"exit code {process.exitcode}"
                died = ProcessDiedError(
                    f"A data loading process has died: process {process.pid}, {how}. The usual"
                    " reason is a lack of memory: give a smaller --num-workers."
                )
                work.set_exception(self._end(died))
            except Exception as error:
                work.set_exception(error)
            # Wait for the next with none of them in hand.
            made = given = job = work = None  # type: ignore[assignment]
        connection.close()

    def _end(self, why: Exception) -> Exception:
        self.over = self.over or why
        for process in self._processes:
            process.kill()
        return self.over


class Ordered[Job, Made](Iterator[Made]):
    """The results of jobs in their order, whatever process made them."""

    def __init__(self, pool: Pool[Job, Made], jobs: Iterator[Job]) -> None:
        self._pool, self._jobs = pool, jobs
        self._begun: deque[Future[Made]] = deque()
        self._end: Exception | None = None

    def made(self, number: int) -> bool:
        """Whether so many results are made, or all that run ahead."""
        self._begin()
        return all(each.done() for each in islice(self._begun, number))

    def __next__(self) -> Made:
        """The next result, or its error; behind the last one, what the jobs raised, as it was."""
        self._begin()
        if self._begun:
            return self._begun.popleft().result()
        assert self._end is not None
        raise self._pool.over or self._end

    def _begin(self) -> None:
        """Begin jobs as far ahead as settings allow; one at least."""
        settings = self._pool.settings
        while self._end is None and len(self._begun) <= settings.processes * settings.depth:
            try:
                self._begun.append(self._pool.submit(next(self._jobs)))
            except Exception as error:  # StopIteration, too
                self._end = error


@contextmanager
def garbage_stays_here() -> Iterator[None]:
    """Processes that are forked meanwhile never free what has threads in this one alone."""
    somebody_froze = gc.get_freeze_count() > _FROZEN_FROM_THE_START
    gc.freeze()
    try:
        yield
    finally:
        if not somebody_froze:  # else it is for good
            gc.unfreeze()


def map_rows[T](
    task: Callable[[int], T], count: int, *, processes: int | None, console: Console, title: str
) -> Iterator[T]:
    """What ``task`` makes of each row from 0 to ``count``, in their order, with a progress bar."""
    if processes is None:
        processes = len(os.sched_getaffinity(0))
    if processes < 1:
        raise ValueError(f"{processes} processes asked for: expected at least 1.")
    chunks = [range(start, min(start + _ROWS, count)) for start in range(0, count, _ROWS)]
    several = min(processes, len(chunks)) if len(chunks) > 1 else 0  # else in this process
    settings = WorkerSettings(processes=several)
    pool = Pool[range, list[T]](lambda rows: [task(row) for row in rows], settings=settings)
    work = pool.ordered(iter(chunks))
    try:
        first = list(islice(work, 1))  # forks before the progress bar starts its thread
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task(title, total=count)
            for values in chain(first, work):
                yield from values
                progress.advance(bar, len(values))
    except ProcessDiedError as error:
        raise ValueError(
            "A process was killed while it read the rows, perhaps for lack of memory: ask for fewer"
            " with --processes."
        ) from error
    finally:
        pool.close()


class _Late[Made](Future[Made]):
    """What is made when it is first asked for, once."""

    def __init__(self, make: Callable[[], Made]) -> None:
        super().__init__()
        self._make = make

    def result(self, timeout: float | None = None) -> Made:
        if not self.done():
            try:
                self.set_result(self._make())
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)


def _work[Job, Made](make: Callable[[Job], Made], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: whoever asked ends this process
    # Threads do not survive the fork: the tokenizer's would warn of that, torch's wait for ever.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the other end is gone
        while True:
            job = connection.recv()
            try:
                connection.send((make(job), None))
            # Exceptions themselves need not survive pickling.
            except ValueError as error:
                connection.send((None, ValueError(str(error))))
            except Exception as error:
                said = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
                connection.send((None, RuntimeError(f"In a data loading process: {said}")))


def _end_with_the_parent() -> None:
    parent = parent_process()
    assert parent is not None
    while os.getppid() == parent.pid:  # processes that were forked later keep the sentinel quiet
        wait([parent.sentinel], 2.0)
    os._exit(1)


class ByteBoundedCache[K: Hashable, V]:
    """Values by key, at most ``max_bytes`` of them by the sizes that the caller states."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, *, size: int) -> None:
        """Keep a value of ``size`` bytes, unless it is larger than the whole cache."""
        if size > self._max_bytes:
            return
        self._bytes += size - self._entries.pop(key, (value, 0))[1]
        self._entries[key] = value, size
        while self._bytes > self._max_bytes:
            _, (_, dropped) = self._entries.popitem(last=False)
            self._bytes -= dropped
