"""Errors reach all ranks.

A rank that fails alone leaves the others waiting in a collective until a timeout of many
minutes. Here each rank watches a key in torchrun's own store from a daemon thread. Ranks whose
main thread ends with an exception agree on who prints it (``verdict.py``); all others then end in
silence and with the same exit code, also from inside a collective. The main thread pays nothing for
it, and every wait is bounded. Where the store is gone, whoever has failed says so itself.
"""

import errno
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn

from torch.distributed import PrefixStore, Store, TCPStore

from loongplug.parallel import endings
from loongplug.parallel.store_keys import comes
from loongplug.parallel.verdict import (
    Failure,
    SharedFaultError,
    Verdict,
    agree,
    is_settled,
    read_verdict,
)
from loongplug.parallel.world import take_rank

TRACEBACK_VARIABLE = "LOONGPLUG_TRACEBACK"

WATCH_SECONDS = 0.5
# How long ranks wait for each other before they end: the first to go has torchrun end the rest,
# also one that is still printing. A rank that cannot answer (busy in C code that holds the
# interpreter) is left to torchrun.
PARTING_SECONDS = 5.0
STORE_SECONDS = 10.0

_SEEN, _ALL_SEEN = "seen", "all_seen"
# What gloo and NCCL say on ranks that did nothing wrong.
_GONE = re.compile(
    "connection (closed|reset) by peer|broken pipe|timed out waiting|socket closed|remote process",
    re.IGNORECASE,
)
FULL = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "No space left on device: the quota is used up",
}
_SIGTERM_EXIT, _SIGINT_EXIT = 128 + signal.SIGTERM, 128 + signal.SIGINT

StoreFactory = Callable[[timedelta], Store]
AtEnd = Callable[[Callable[[], None]], None]


class FailureBoard:
    """One rank's end of the board.

    ``store_factory(timeout)`` opens a new connection to a store that all ranks reach; the
    watcher and the main thread each use their own.
    """

    def __init__(self, store_factory: StoreFactory, *, rank: int, world_size: int) -> None:
        self._open = store_factory
        self._rank = rank
        self._world_size = world_size
        self._tidied: list[Callable[[], None]] = []
        self._stopped = threading.Event()
        self._ending = threading.Lock()  # held by the thread that ends this process
        self._watcher = threading.Thread(
            target=self._watch, name="loongplug-failure-board", daemon=True
        )

    def start(self) -> None:
        """Watch from now on."""
        self._watcher.start()

    def at_end(self, tidy: Callable[[], None]) -> None:
        """Have the watcher call ``tidy`` before it ends this process for another rank's failure."""
        self._tidied.append(tidy)

    def stop(self) -> None:
        """Watch no longer; nothing is posted."""
        self._stopped.set()
        self._watcher.join(timeout=STORE_SECONDS)

    def fail(self, report: str, *, message: str, code: int, knows: int = 0) -> NoReturn:
        """End all ranks; ``report`` is printed here or by a lower rank with the same ``message``.

        Or by one that ``knows`` more of it. From the main thread.
        """
        if not self._ending.acquire(blocking=False):
            # The watcher heard of another rank's failure first and is ending this process.
            time.sleep(2 * PARTING_SECONDS)
            os._exit(code)
        # torchrun ends what is left when a rank has died: not before this one has spoken.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        store = None
        try:
            store = self._open(timedelta(seconds=STORE_SECONDS))
            mine = Failure(self._rank, message, code, knows)
            verdict = agree(store, mine, world_size=self._world_size)
        except Exception:  # mostly, the store is gone; the message must not be lost
            verdict = Verdict([self._rank], code)
        try:
            if self._rank in verdict.speakers:
                _print(report)
            if store is not None:
                self._part(store)
        finally:
            _exit(verdict)

    def _watch(self) -> None:
        store = self._connect()
        if store is None:
            return
        try:
            while not is_settled(store):
                if self._stopped.wait(WATCH_SECONDS):
                    return
            verdict = read_verdict(store)
        except RuntimeError:
            return  # the store is gone: so is what started the ranks, or it is ending them
        if self._stopped.is_set() or not self._ending.acquire(blocking=False):
            return
        try:
            for tidy in self._tidied:
                with suppress(Exception):
                    tidy()
            self._part(store)
        finally:
            _exit(verdict)

    def _connect(self) -> Store | None:
        """The watcher's connection; outside torchrun, rank 0 may come later."""
        while not self._stopped.is_set():
            try:
                return self._open(timedelta(seconds=STORE_SECONDS))
            except RuntimeError:
                self._stopped.wait(WATCH_SECONDS)
        return None

    def _part(self, store: Store) -> None:
        """Wait until every rank is about to end, and so has printed what it had to."""
        with suppress(RuntimeError):
            if store.add(_SEEN, 1) >= self._world_size:
                store.set(_ALL_SEEN, "1")
            comes(store, _ALL_SEEN, seconds=PARTING_SECONDS)


@contextmanager
def failure_board(store_factory: StoreFactory | None = None) -> Iterator[AtEnd]:
    """Around a rank's main: its failure becomes every rank's, and a bad input one sentence.

    A ValueError is the user's: its message is printed without a traceback (with one where
    LOONGPLUG_TRACEBACK is 1). Any other exception is printed with its traceback. The process
    then ends with code 1, or with that of a SystemExit. Among several ranks it ends without
    atexit handlers, because those of a process group may wait for ranks that are gone.

    A clean end, ``sys.exit(0)`` and an end by SIGTERM are told to nobody; Ctrl-C ends all ranks
    with one line. The store is the one of ``world.py`` unless another is given.

    Gives what takes functions to call where another rank's failure ends this process: contexts are
    not left then, as they are where this rank fails itself.
    """
    try:
        rank, world_size = take_rank()
    except ValueError as error:
        _fail(None, _report(error, 0), message=str(error), code=1)
    board = None
    if world_size > 1 and (store_factory is not None or "MASTER_ADDR" in os.environ):
        board = FailureBoard(store_factory or torchrun_store, rank=rank, world_size=world_size)
        board.start()
    try:
        yield nothing_at_end if board is None else board.at_end
    except SystemExit as error:
        if error.code in (None, 0, _SIGTERM_EXIT):
            raise
        if isinstance(error.code, int):
            message = f"exited with code {error.code}"
            report = f"loongplug: error [rank {rank}]: {message}" if board is not None else ""
            _fail(board, report, message=message, code=error.code)
        message = str(error.code)
        _fail(board, f"loongplug: error [rank {rank}]: {message}", message=message, code=1)
    except KeyboardInterrupt:
        _fail(board, "loongplug: interrupted", message="interrupted", code=_SIGINT_EXIT)
    except BaseException as caught:  # torch's CheckpointException is not an Exception
        words = _in_words(caught)
        knows = words.knows if isinstance(words, SharedFaultError) else 0
        _fail(board, _report(words, rank), message=_common(words), code=1, knows=knows)
    finally:
        if board is not None:
            board.stop()
        endings.ended()


def nothing_at_end(tidy: Callable[[], None]) -> None:
    """For a process that leaves its contexts however it ends."""


def torchrun_store(timeout: timedelta, *, purpose: str = "failure") -> Store:
    """A new connection to the store that torchrun serves to the ranks (MASTER_ADDR, _PORT).

    Keys are of one purpose and of this attempt: torchrun keeps the store when it starts ranks
    again.
    """
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"loongplug/{purpose}/{attempt}", store)


def met_store(rank: int, *, limit: timedelta, purpose: str) -> Store:
    """As :func:`torchrun_store`. ValueError where rank 0 is not there, or two have one rank."""
    try:
        store = torchrun_store(limit, purpose=purpose)
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ValueError(
            f"rank 0 was not at {where} within {limit}: give all ranks its MASTER_ADDR and one "
            "MASTER_PORT, or see why it did not start"
        ) from error
    this = f"process {os.getpid()} on {socket.gethostname()}"
    first = store.compare_set(f"process/{rank}", "", this).decode()
    if first != this:
        raise ValueError(f"rank {rank} was started twice, as {first} and {this}: start it once")
    return store


def _fail(
    board: FailureBoard | None, report: str, *, message: str, code: int, knows: int = 0
) -> NoReturn:
    if board is not None:
        board.fail(report, message=message, code=code, knows=knows)
    endings.failed(code)
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
        words = SharedFaultError(f"{what}; {how}", fault="another rank", knows=-1)
    if words is not error:
        words.__cause__ = error
    return words


def _message(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _common(error: BaseException) -> str:
    """What equal failures have in common: of crashes addresses, ports and sizes may differ."""
    if isinstance(error, SharedFaultError):
        return error.fault
    text = _message(error)
    return text if isinstance(error, ValueError) else re.sub(r"\d+", "#", text)


def _report(error: BaseException, rank: int) -> str:
    line = f"loongplug: error [rank {rank}]: {_message(error)}"
    if isinstance(error, ValueError) and os.environ.get(TRACEBACK_VARIABLE) != "1":
        return line
    return "".join(traceback.format_exception(error)) + line


def _print(text: str) -> None:
    if not text:
        return
    # A progress bar may have hidden the cursor and left its line open.
    restore = "\x1b[?25h\n" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{restore}{text}\n")
    sys.stderr.flush()


def _exit(verdict: Verdict) -> NoReturn:
    _tell_torchrun(verdict)
    endings.failed(verdict.code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(verdict.code)


def _tell_torchrun(verdict: Verdict) -> None:
    """Make torchrun's table of ranks, on each node, name the rank that has told the reason."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    who = ", ".join(map(str, verdict.speakers))
    text = f"see the message of rank {who}"
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    whole = f"{path}.whole"  # torchrun ends this process in any moment, and fails by half a file
    with suppress(OSError):
        with open(whole, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
        os.replace(whole, path)
