"""A checkpoint that cannot be written: every rank ends with the words of those that failed.

Of a writer's error Megatron keeps the name of its class (the words go to a log, which may lie on
the same full disk), and tells it to one rank only.
"""

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from loongplug.parallel.failure import full_disk

# What Megatron says of a writer that has ended without an answer.
_NO_ANSWER = "results_queue should not be empty"


def write_buckets(
    transform_list: Sequence[Any],
    use_msc: bool,
    rank: int,
    write_buckets: Sequence[Any],
    global_results_queue: Any,
) -> None:
    """Megatron's ``FileSystemWriterAsync.write_preloaded_data_multithread``: a thread per file.

    Leaves in the queue what each file's writer gave, by its number, or a RuntimeError with the
    words of all that failed.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def write(number: int) -> tuple[int, Any]:
        try:
            written: tuple[int, Any] = FileSystemWriterAsync.write_preloaded_data(
                transform_list,
                local_proc_idx=number,
                write_bucket=write_buckets[number],
                results_queue=None,
                count_queue=None,
                use_fsync=True,
                use_msc=use_msc,
            )
        except Exception as error:
            written = number, error
        if isinstance(written[1], Exception):
            _let_go(written[1])
            written = number, full_disk(written[1]) or written[1]
        return written

    collects = gc.isenabled()
    gc.disable()  # in a forked writer it could free what belongs to CUDA
    try:
        with ThreadPoolExecutor(max_workers=len(write_buckets)) as pool:
            written = list(pool.map(write, range(len(write_buckets))))
    finally:
        if collects:
            gc.enable()
    errors = [result for _, result in written if isinstance(result, Exception)]
    words = dict.fromkeys(f"{type(error).__name__}: {error}" for error in errors)
    global_results_queue.put(RuntimeError("; ".join(words)) if errors else dict(written))


def _let_go(error: BaseException) -> None:
    """Drop the frames that ``error`` and what it came from hold, and with them what they have open.

    Upstream's frame keeps the error that keeps the frame. Were they left to the collector, it could
    take a file from under torch's writer, which still writes to it as it ends: a crash.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__


def told_to_all(original: Callable[..., None]) -> Callable[..., None]:
    """``save_state_dict_async_finalize`` that raises the same ValueError on every rank.

    Collective as that is: the group of ``dist_wrapper``.
    """
    from torch.distributed.checkpoint import CheckpointException

    @functools.wraps(original)
    def save_state_dict_async_finalize(
        storage_writer: Any, global_metadata: Any, dist_wrapper: Any
    ) -> None:
        told: list[str | None] = [None]
        try:
            original(storage_writer, global_metadata, dist_wrapper)
            return
        except CheckpointException as error:  # on every rank; one knows why
            if error.failures:
                told = ["The checkpoint cannot be written. " + _words(error.failures)]
        dist.broadcast_object_list(
            told, src=dist_wrapper.coordinator_rank, group=dist_wrapper.group
        )
        raise ValueError(told[0])

    return save_state_dict_async_finalize


def _words(failures: Mapping[int, Any]) -> str:
    """``failures`` by rank; each is an exception and where it was raised."""
    reasons = {
        rank: str(reason).removeprefix("Worker failure: ") for rank, (reason, _) in failures.items()
    }
    return "; ".join(
        f"rank {rank}: "
        + ("its writer has died, maybe for lack of memory" if reason == _NO_ANSWER else reason)
        for rank, reason in reasons.items()
    )
