"""Something done to every row, in several processes, with a progress bar."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.progress import Progress

_CHUNK = 32  # rows at a time


def map_rows[T](
    task: Callable[[int], T], count: int, *, processes: int | None, console: Console, title: str
) -> Iterator[T]:
    """What ``task`` makes of each row from 0 to ``count``, in their order.

    Without a number of ``processes``, one for each processor works. They are forked, so ``task``
    may hold what cannot be pickled; what it returns must be picklable. They run ahead by what fits
    into their pipes and no further.

    Raises ValueError when a process was killed, and what ``task`` raises.
    """
    if processes is None:
        processes = len(os.sched_getaffinity(0))
    if processes < 1:
        raise ValueError(f"{processes} processes asked for: expected at least 1.")
    chunks = [range(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
    processes = min(processes, max(1, len(chunks)))
    # Forked before the progress bar starts its thread.
    workers = [_started(task, chunks[number::processes]) for number in range(processes)]
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task(title, total=count)
            for number, chunk in enumerate(chunks):
                yield from _received(workers[number % processes][1])
                progress.advance(bar, len(chunk))
    finally:
        for process, connection in workers:
            connection.close()
            process.terminate()
            process.join()


def _started(
    task: Callable[[int], Any], chunks: Sequence[range]
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(task, chunks, there), daemon=True)
    process.start()
    there.close()  # so that the end of the process ends the pipe
    return process, here


def _work(task: Callable[[int], Any], chunks: Sequence[range], connection: Connection) -> None:
    try:
        for chunk in chunks:
            connection.send([task(row) for row in chunk])
    except Exception as error:
        connection.send(error)


def _received(connection: Connection) -> list[Any]:
    try:
        values = connection.recv()
    except EOFError as error:
        raise ValueError(
            "A process was killed while it read the rows, perhaps for want of memory: ask for fewer"
            " with --processes."
        ) from error
    if isinstance(values, Exception):
        raise values
    return values
