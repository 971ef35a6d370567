"""Errors reach all ranks.

A rank that fails alone leaves the others waiting in a collective until a timeout of many minutes.
Here the first rank whose main ends with an exception says so by one key of torchrun's store, and
prints its message. Each rank looks at that key from a daemon thread; all ranks but the first end in
silence and with the same exit code, also from inside a collective. The main thread pays nothing
for it, and no wait is without a bound. Where the store is gone, whoever has failed says so itself.
"""

import errno
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, NoReturn

from torch.distributed import Store

from loongplug.parallel import exit_notes
from loongplug.parallel.rendezvous import comes, take_rank, torchrun_store

TRACEBACK_VARIABLE = "LOONGPLUG_TRACEBACK"

WATCH_SECONDS = 0.5  # from one look at the key to the next
# From the end of a rank's work to its exit: others look meanwhile. The first to go may take the
# store with it, or have torchrun end the rest.
PARTING_SECONDS = 2.0
TURN_SECONDS = 0.5
STORE_SECONDS = 10.0

_FIRST_ERROR = "first error"
# What gloo and NCCL say on ranks that did nothing wrong.
_GONE = re.compile(
    "connection (closed|reset) by peer|broken pipe|timed out waiting|socket closed|remote process",
    re.IGNORECASE,
)
_LAST_TURN = 4
FULL = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "No space left on device: the quota is used up",
}
_SIGTERM_EXIT, _SIGINT_EXIT = 128 + signal.SIGTERM, 128 + signal.SIGINT

StoreFactory = Callable[[timedelta], Store]
AtEnd = Callable[[Callable[[], None]], None]


class SharedFaultError(ValueError):
    """A fault that ranks meet together and tell each in its own words; one of them is printed.

    Who knows most of it has turn 0. A later ``turn`` waits a moment for what others have to say.
    """

    def __init__(self, text: str, *, turn: int) -> None:
        super().__init__(text)
        self.turn = turn


class FirstError(NamedTuple):
    """The rank that prints why all ranks end, and the code that they end with."""

    rank: int
    code: int


class FailureBoard:
    """One rank's connection to the key of the first error, which a thread watches from now on.

    ``store_factory(timeout)`` opens a new connection to a store that all ranks reach; the
    watcher and the main thread each use their own.
    """

    def __init__(self, store_factory: StoreFactory, *, rank: int) -> None:
        self._open = store_factory
        self._rank = rank
        self._tidied: list[Callable[[], None]] = []
        self._stopped = threading.Event()
        self._ending = threading.Lock()  # held by the thread that ends this process
        self._watcher = threading.Thread(
            target=self._watch, name="loongplug-failure-board", daemon=True
        )
        self._watcher.start()

    def at_end(self, tidy: Callable[[], None]) -> None:
        """Have the watcher call ``tidy`` before it ends this process for another rank's failure."""
        self._tidied.append(tidy)

    def stop(self) -> None:
        """Watch no longer; nothing is posted."""
        self._stopped.set()
        self._watcher.join(timeout=STORE_SECONDS)

    def fail(self, report: str, *, code: int, turn: int = 0) -> NoReturn:
        """End all ranks; ``report`` is printed where no other rank has failed before.

        From the main thread.
        """
        if not self._ending.acquire(blocking=False):
            # The watcher heard of another rank's failure first and is ending this process.
            time.sleep(PARTING_SECONDS + STORE_SECONDS)
            os._exit(code)
        # torchrun ends what is left when a rank has died: not before this one has spoken.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        first = mine = FirstError(self._rank, code)
        # Mostly, the store is gone; the message must not be lost.
        with suppress(Exception):
            store = self._open(timedelta(seconds=STORE_SECONDS))
            comes(store, _FIRST_ERROR, seconds=turn * TURN_SECONDS)
            first = FirstError(*json.loads(store.compare_set(_FIRST_ERROR, "", json.dumps(mine))))
        try:
            if first == mine:
                _print(report)
        finally:
            _exit(first)

    def _watch(self) -> None:
        store = None
        while store is None:
            try:
                store = self._open(timedelta(seconds=STORE_SECONDS))
            except RuntimeError:  # outside torchrun, rank 0 may come later
                if self._stopped.wait(WATCH_SECONDS):
                    return
        try:
            while not store.check([_FIRST_ERROR]):
                if self._stopped.wait(WATCH_SECONDS):
                    return
            first = FirstError(*json.loads(store.get(_FIRST_ERROR)))
        except RuntimeError:
            return  # the store is gone: so is what started the ranks, or it is ending them
        if self._stopped.is_set() or not self._ending.acquire(blocking=False):
            return
        try:
            for tidy in self._tidied:
                with suppress(Exception):
                    tidy()
        finally:
            _exit(first)


@contextmanager
def failure_board(store_factory: StoreFactory | None = None) -> Iterator[AtEnd]:
    """Around a rank's main: its failure becomes every rank's, and a bad input one sentence.

    A ValueError is the user's: its message is printed without a traceback (with one where
    LOONGPLUG_TRACEBACK is 1). Any other exception is printed with its traceback. The process
    then ends with code 1, or with that of a SystemExit. Among several ranks it ends without
    atexit handlers, because those of a process group may wait for ranks that are gone.

    A clean end, ``sys.exit(0)`` and an end by SIGTERM are told to nobody; Ctrl-C ends all ranks
    with one line. The store is that of ``rendezvous.py`` unless another is given.

    Gives what takes functions to call where another rank's failure ends this process: contexts are
    not left then, as they are where this rank fails itself.
    """
    try:
        rank, world_size = take_rank()
    except ValueError as error:
        _fail(None, _report(error, 0), code=1)
    board = None
    if world_size > 1 and (store_factory is not None or "MASTER_ADDR" in os.environ):
        board = FailureBoard(store_factory or torchrun_store, rank=rank)
    try:
        yield nothing_at_end if board is None else board.at_end
    except SystemExit as error:
        if error.code in (None, 0, _SIGTERM_EXIT):
            raise
        if isinstance(error.code, int):
            message = f"loongplug: error [rank {rank}]: exited with code {error.code}"
            report = message if board is not None else ""
            _fail(board, report, code=error.code)
        _fail(board, f"loongplug: error [rank {rank}]: {error.code}", code=1)
    except KeyboardInterrupt:
        _fail(board, "loongplug: interrupted", code=_SIGINT_EXIT)
    except BaseException as caught:  # torch's CheckpointException is not an Exception
        fault = _in_words(caught)
        turn = fault.turn if isinstance(fault, SharedFaultError) else 0
        _fail(board, _report(fault, rank), code=1, turn=turn)
    finally:
        if board is not None:
            board.stop()
        exit_notes.ended()


def nothing_at_end(tidy: Callable[[], None]) -> None:
    """Take no function: a process that leaves its contexts however it ends needs none."""


def _fail(board: FailureBoard | None, report: str, *, code: int, turn: int = 0) -> NoReturn:
    if board is not None:
        board.fail(report, code=code, turn=turn)
    exit_notes.failed(code)
    _print(report)
    raise SystemExit(code)


def full_disk(error: BaseException | None) -> OSError | None:
    """That a disk is full, where an error is that or has come of it: libraries say it otherwise."""
    while error is not None and not (isinstance(error, OSError) and error.errno in FULL):
        error = error.__cause__ or error.__context__
    return error


def _in_words(error: BaseException) -> BaseException:
    """One sentence for a full disk, and for the loss of another rank, which says more itself."""
    words = error
    gone = _GONE.search(str(error)) if isinstance(error, RuntimeError) else None
    if (full := full_disk(error)) is not None and not isinstance(error, ValueError):
        words = ValueError(f"{full.filename or 'a file'} cannot be written ({full}): make room.")
    elif gone is not None:
        what = f"another rank has ended or does not answer ({gone[0]})"
        how = f"{TRACEBACK_VARIABLE}=1 shows where this one was"
        words = SharedFaultError(f"{what}; {how}", turn=_LAST_TURN)
    if words is not error:
        words.__cause__ = error
    return words


def _report(error: BaseException, rank: int) -> str:
    wrong_input, text = isinstance(error, ValueError), str(error)
    said = text if wrong_input and text else f"{type(error).__name__}: {text}".removesuffix(": ")
    line = f"loongplug: error [rank {rank}]: {said}"
    if wrong_input and os.environ.get(TRACEBACK_VARIABLE) != "1":
        return line
    return "".join(traceback.format_exception(error)) + line


def _print(text: str) -> None:
    if not text:
        return
    # A progress bar may have hidden the cursor and left its line open.
    restore = "\x1b[?25h\n" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{restore}{text}\n")
    sys.stderr.flush()


def _exit(first: FirstError) -> NoReturn:
    _tell_torchrun(first)
    exit_notes.failed(first.code)
    logging.shutdown()
    with suppress(Exception):  # of a closed pipe
        sys.stdout.flush()
        sys.stderr.flush()
    time.sleep(PARTING_SECONDS)
    os._exit(first.code)


def _tell_torchrun(first: FirstError) -> None:
    """Make torchrun's table of ranks, on each node, name the rank that has told the reason."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    text = f"see the message of rank {first.rank}"
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    whole = f"{path}.whole"  # torchrun ends this process in any moment, and fails by half a file
    with suppress(OSError):
        with open(whole, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
        os.replace(whole, path)
