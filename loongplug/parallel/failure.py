"""Errors reach all ranks.

A rank that fails alone leaves the others waiting in a collective until a timeout of many
minutes. Here each rank watches a key in torchrun's own store from a daemon thread. A rank
whose main thread ends with an exception sets that key; every other rank then prints who
failed and why, and all end with the same exit code, also from inside a collective. The main
thread pays nothing for it, and every wait is bounded.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

from torch.distributed import PrefixStore, Store, TCPStore

TRACEBACK_VARIABLE = "LOONGPLUG_TRACEBACK"

WATCH_SECONDS = 0.5
# How long ranks wait for each other to say their line before they end; a rank that cannot
# answer (busy in C code that holds the interpreter) is left to torchrun.
PARTING_SECONDS = 5.0
STORE_SECONDS = 10.0

_FAILED, _POSTS, _SEEN, _ALL_SEEN = "failed", "posts", "seen", "all_seen"
_SIGTERM_EXIT = 128 + 15

StoreFactory = Callable[[timedelta], Store]


@dataclass(frozen=True)
class _Failure:
    rank: int
    message: str
    code: int


class FailureBoard:
    """One rank's end of the board.

    ``store_factory(timeout)`` opens a new connection to a store that all ranks reach; the
    watcher and the main thread each use their own.
    """

    def __init__(self, store_factory: StoreFactory, *, rank: int, world_size: int) -> None:
        self._open = store_factory
        self._rank = rank
        self._world_size = world_size
        self._stopped = threading.Event()
        self._ending = threading.Lock()  # held by the thread that ends this process
        self._watcher = threading.Thread(
            target=self._watch, name="loongplug-failure-board", daemon=True
        )

    def start(self) -> None:
        """Watch from now on."""
        self._watcher.start()

    def stop(self) -> None:
        """Watch no longer; nothing is posted."""
        self._stopped.set()
        self._watcher.join(timeout=STORE_SECONDS)

    def fail(self, report: str, *, message: str, code: int) -> NoReturn:
        """Print ``report`` here, tell the other ranks ``message``, and end the process."""
        if not self._ending.acquire(blocking=False):
            # The watcher heard of another rank's failure first and is ending this process.
            time.sleep(2 * PARTING_SECONDS)
            os._exit(code)
        _print(report)
        try:
            store = self._open(timedelta(seconds=STORE_SECONDS))
            if store.add(_POSTS, 1) == 1:
                failure = _Failure(self._rank, message, code)
                store.set(_FAILED, json.dumps(asdict(failure)))
            else:
                code = _read(store).code
            self._part(store)
        finally:
            _exit(code)

    def _watch(self) -> None:
        store = self._connect()
        if store is None:
            return
        try:
            while not store.check([_FAILED]):
                if self._stopped.wait(WATCH_SECONDS):
                    return
            failure = _read(store)
        except RuntimeError:
            return  # the store is gone: so is what started the ranks, or it is ending them
        if self._stopped.is_set() or not self._ending.acquire(blocking=False):
            return
        line = _one_line(failure.message)
        _print(f"loongplug: error [rank {self._rank}]: rank {failure.rank} failed: {line}")
        try:
            self._part(store)
        finally:
            _exit(failure.code)

    def _connect(self) -> Store | None:
        """The watcher's connection; outside torchrun the store comes with the process group."""
        while not self._stopped.is_set():
            try:
                return self._open(timedelta(seconds=STORE_SECONDS))
            except RuntimeError:
                self._stopped.wait(WATCH_SECONDS)
        return None

    def _part(self, store: Store) -> None:
        """Wait until every rank has said its line: the first to go has torchrun end the rest."""
        try:
            if store.add(_SEEN, 1) >= self._world_size:
                store.set(_ALL_SEEN, "1")
            store.wait([_ALL_SEEN], timedelta(seconds=PARTING_SECONDS))
        except RuntimeError:
            return


@contextmanager
def failure_board(store_factory: StoreFactory | None = None) -> Iterator[None]:
    """Around a rank's main: its failure becomes every rank's, and a bad input one sentence.

    A ValueError is the user's: its message is printed without a traceback (with one where
    LOONGPLUG_TRACEBACK is 1). Any other exception is printed with its traceback. The process
    then ends with code 1, or with that of a SystemExit. Among several ranks it ends without
    atexit handlers, because those of a process group may wait for ranks that are gone.

    A clean end, ``sys.exit(0)``, an interrupt and an end by SIGTERM are told to nobody. RANK
    and WORLD_SIZE say which rank this is; the store is torchrun's unless one is given.
    """
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    board = None
    if world_size > 1 and (store_factory is not None or "MASTER_ADDR" in os.environ):
        board = FailureBoard(store_factory or torchrun_store, rank=rank, world_size=world_size)
        board.start()
    try:
        yield
    except SystemExit as error:
        if error.code in (None, 0, _SIGTERM_EXIT):
            raise
        if isinstance(error.code, int):
            _fail(board, "", message=f"exited with code {error.code}", code=error.code)
        message = str(error.code)
        _fail(board, f"loongplug: error [rank {rank}]: {message}", message=message, code=1)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        _fail(board, _report(error, rank), message=_message(error), code=1)
    finally:
        if board is not None:
            board.stop()


def torchrun_store(timeout: timedelta) -> Store:
    """A new connection to the store that torchrun serves to the ranks (MASTER_ADDR, _PORT)."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"loongplug/failure/{attempt}", store)


def _fail(board: FailureBoard | None, report: str, *, message: str, code: int) -> NoReturn:
    if board is not None:
        board.fail(report, message=message, code=code)
    _print(report)
    raise SystemExit(code)


def _message(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _report(error: BaseException, rank: int) -> str:
    line = f"loongplug: error [rank {rank}]: {_message(error)}"
    if isinstance(error, ValueError) and os.environ.get(TRACEBACK_VARIABLE) != "1":
        return line
    return "".join(traceback.format_exception(error)) + line


def _read(store: Store) -> _Failure:
    return _Failure(**json.loads(store.get(_FAILED)))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _print(text: str) -> None:
    if not text:
        return
    # A progress bar may have hidden the cursor and left its line open.
    restore = "\x1b[?25h\n" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{restore}{text}\n")
    sys.stderr.flush()


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
