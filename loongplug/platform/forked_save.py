"""Asynchronous saves on the CPU: each is written by a fork of its rank.

The fork has the memory as it was, without a copy, while training goes on.
"""

import functools
import pickle
import queue
import tempfile
from collections.abc import Callable
from typing import Any


class ForkedResults:
    """What one forked writer tells its rank: an unnamed file, which holds any amount.

    A pipe would fill up while the rank waits for the writer's end, and a manager would be one
    more process, which outlives a rank that is killed.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the save

    def put(self, results: Any) -> None:
        """Leave the one answer; for the writer."""
        pickle.dump(results, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """The writer's answer, after its end; ``queue.Empty`` when it ended without."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)  # written by this process's own fork
        except (EOFError, pickle.UnpicklingError) as error:
            raise queue.Empty from error


def results_per_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """``get_write_results_queue`` that gives each save a place of its own."""

    @functools.wraps(original)
    def get_write_results_queue(mp_mode: str = "spawn") -> ForkedResults:
        return ForkedResults()

    return get_write_results_queue


def no_worker(rank: int, mp_mode: str = "spawn") -> None:
    """``init_persistent_async_worker`` where there is none."""


def forking_caller(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``AsyncCallsQueue._get_async_caller`` that never answers with the persistent worker."""

    @functools.wraps(original)
    def _get_async_caller(self: Any) -> Any:
        from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

        return TemporalAsyncCaller()

    return _get_async_caller
