"""Work ahead of its use in background processes, by torch's data loader."""

import gc
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from rich.console import Console
from rich.progress import Progress

from loongplug.platform.forks import signals_wait

_ROWS = 32  # of map_rows, at a time
_FROZEN_FROM_THE_START = gc.get_freeze_count()  # Python's own


class ProcessDiedError(RuntimeError):
    """A background process was killed, mostly for lack of memory."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How much runs ahead: ``processes * depth`` results at most wait for their use.

    Without processes, each result is made when it is asked for. ``pin_memory`` moves results to
    page-locked memory, from which copies to a GPU need not be waited for.
    """

    processes: int = 0
    depth: int = 2
    pin_memory: bool = False


IN_PROCESS = WorkerSettings()


@dataclass(frozen=True)
class _Failure:
    """An exception as it leaves its process: exceptions themselves need not survive pickling."""

    message: str
    expected: bool  # a ValueError, which says everything itself
    trace: str


class Background[Item, Result](Iterator[Result]):
    """``function(item)`` for each of ``items``, in their order, whatever process made it.

    The processes are forked when the first result is asked for, so they see ``function`` as it is
    then, and what it keeps (caches) is each one's own. ``items`` are taken in this process, as
    far ahead as ``settings`` allow.
    """

    def __init__(
        self,
        function: Callable[[Item], Result],
        items: Iterator[Item],
        *,
        settings: WorkerSettings,
    ) -> None:
        self._function = function
        self._items = _Once(items)
        self._settings = settings
        self._results: Iterator[tuple[Result, _Failure | None]] | None = None
        self._died: ProcessDiedError | None = None

    def __next__(self) -> Result:
        """The next result.

        Raises:
            ValueError: the function raised one; with its message.
            RuntimeError: the function raised something else, or a process has died (a
                ProcessDiedError). Once one has died, every call says so.
            Exception: what the items raised, as it was, behind the results of those before.
        """
        if self._settings.processes == 0:
            return self._function(next(self._items.items))
        # Torch's iterator raises a death once; asked again, it just ends. The first caller may be
        # one that works ahead and keeps the error for later.
        if self._died is not None:
            raise self._died
        if self._results is None:
            self._results = self._start()
        try:
            result, failure = next(self._results)
        except StopIteration:
            if self._items.error is not None:
                raise self._items.error from None
            raise
        # RuntimeError is torch's, when it finds a process gone; the others come of asking one for
        # the memory of a result that it announced before it died.
        except (RuntimeError, OSError, EOFError) as error:
            self._died = ProcessDiedError(
                f"A data loading process has died: {error or type(error).__name__}. The usual"
                " reason is a lack of memory: give a smaller --num-workers."
            )
            raise self._died from error
        if failure is None:
            return result
        if failure.expected:
            raise ValueError(failure.message)
        raise RuntimeError(f"In a data loading process: {failure.message}\n{failure.trace}")

    def close(self) -> None:
        """End the processes; nothing more can be asked for."""
        self._items = _Once(iter(()))
        self._results = None

    def _start(self) -> Iterator[tuple[Result, _Failure | None]]:
        import torch  # not above: few rows are read without it
        from torch.utils.data import DataLoader

        loader: DataLoader[Any] = DataLoader(
            _Task(self._function),  # type: ignore[arg-type]  # it needs no base class
            sampler=self._items,
            batch_size=None,  # an item may hold anything
            collate_fn=_unchanged,
            num_workers=self._settings.processes,
            prefetch_factor=self._settings.depth,
            pin_memory=self._settings.pin_memory,
            multiprocessing_context="fork",  # the function need not be pickled
            worker_init_fn=_begin,
            generator=torch.Generator(),  # by default it draws from the one that training uses
        )
        before = signal.getsignal(signal.SIGCHLD)
        with _garbage_stays_here(), signals_wait():
            results = iter(loader)
        # Torch's handler raises wherever the main thread is when a process dies, in the middle of
        # a step. That it is dead shows when its results are waited for: there it can be told.
        # None is a handler that was not set from Python, and cannot be set again from here.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)
        return results


@contextmanager
def _garbage_stays_here() -> Iterator[None]:
    """Processes that are forked meanwhile never collect what this one has made before.

    Some of it may have threads, which a forked process lacks: a video's decoder that nobody holds
    any more waits for its threads when it is freed, and there that never ends.
    """
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
    """What ``task`` makes of each row from 0 to ``count``, in their order, with a progress bar.

    Without a number of ``processes``, one for each processor works. What ``task`` returns must be
    picklable.

    Raises ValueError when a process was killed, and otherwise as :class:`Background` does.
    """
    if processes is None:
        processes = len(os.sched_getaffinity(0))
    if processes < 1:
        raise ValueError(f"{processes} processes asked for: expected at least 1.")
    chunks = [range(start, min(start + _ROWS, count)) for start in range(0, count, _ROWS)]
    several = min(processes, len(chunks)) if len(chunks) > 1 else 0  # else in this process
    settings = WorkerSettings(processes=several)
    work = Background(lambda rows: [task(row) for row in rows], iter(chunks), settings=settings)
    try:
        with warnings.catch_warnings():  # torch's, of more processes than processors
            warnings.filterwarnings("ignore", "This DataLoader will create")
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
        work.close()


class _Task[Item, Result]:
    """The function as torch's data loader takes it."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        self._function = function

    def __getitem__(self, item: Item) -> tuple[Result | None, _Failure | None]:
        try:
            return self._function(item), None
        except ValueError as error:
            return None, _Failure(str(error), expected=True, trace="")
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            return None, _Failure(message, expected=False, trace=traceback.format_exc())


class _Once[Item]:
    """An iterator as torch's data loader takes the order of its work.

    It ends at an error, which is kept: torch's own would look no different.
    """

    def __init__(self, items: Iterator[Item]) -> None:
        self.items = items
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Item]:
        try:
            yield from self.items
        except Exception as error:
            self.error = error


def _unchanged(result: Any) -> Any:
    return result


def _begin(worker: int) -> None:
    # The tokenizer's threads do not survive the fork; it would warn of that.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
