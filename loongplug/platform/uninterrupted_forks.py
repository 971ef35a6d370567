"""Forks that no signal interrupts: Ctrl-C and SIGTERM wait until they are done."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util


@contextmanager
def signals_wait() -> Iterator[Callable[..., None]]:
    """Ctrl-C and SIGTERM wait for the end of the block.

    An exception between a fork and the note of its process would leave a process that nobody ends
    and, in the new process, run this one's clean-up. A mask of signals does not hold them: another
    thread gets them then, for the main one. Gives what a new process calls once it is on its own,
    as those of multiprocessing do by themselves.
    """
    held: list[int] = []
    alone = (None, signal.SIG_IGN)  # not set from Python, or nothing to hold
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in alone]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # nowhere else do handlers run
    before = {each: signal.signal(each, lambda number, _: held.append(number)) for each in numbers}

    def as_before(*_: object) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    util.register_after_fork(as_before, as_before)  # as long as it is there
    try:
        yield as_before
    finally:
        as_before()
        for number in held:
            signal.raise_signal(number)
