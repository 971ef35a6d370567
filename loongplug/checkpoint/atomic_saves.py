"""Checkpoints that appear whole: written beside their place, then moved into it.

Megatron writes ``iter_0000002`` file by file into its final folder, over whatever an earlier run
left there. Here it writes into ``.saving_iter_0000002_<token>``, which one rename puts in place
when all ranks are done; only then does Megatron advance its tracker file.

A checkpoint that cannot be written ends every rank with the words of those that failed. Of a
writer's error Megatron keeps the name of its class (the words go to a log, which may lie on the
same full disk), and tells it to one rank only.
"""

import functools
import gc
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from loongplug.checkpoint.common_errors import together
from loongplug.output_files import flush
from loongplug.parallel.failure import full_disk
from loongplug.platform.replacements import as_wrapper

SAVING = ".saving_"  # before the name of a checkpoint that is not whole
_REPLACED = ".replaced_"
# Only what has a name as given here is removed or put back.
_CHECKPOINT = r"(iter_\d+|release)"
_SAVING_NAME = re.compile(re.escape(SAVING) + _CHECKPOINT + "_[0-9a-f]+")
_REPLACED_NAME = re.compile(re.escape(_REPLACED) + _CHECKPOINT)
_FILES_OF_A_CHECKPOINT = (".metadata", "metadata.json", "common.pt")
# What Megatron says of a writer that has ended without an answer.
_NO_ANSWER = "results_queue should not be empty"


class AtomicSaves:
    """Wraps Megatron's save of one checkpoint; knows which saves of this run are under way."""

    def __init__(self, *, lock: Path | None = None) -> None:
        """``lock`` is the first rank's, beside the checkpoints: where it is gone, so are they."""
        self._lock = lock
        self._under_way: set[Path] = set()

    def wrap(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """``save(state, checkpoint_dir, ...)`` that leaves ``checkpoint_dir`` whole or untouched.

        Collective: the default group. An asynchronous save (one that returns a request) moves
        its folder when the request is finalized, before what its caller adds to that.
        """

        @functools.wraps(save)
        def atomic_save(
            sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
        ) -> Any:
            final = Path(checkpoint_dir)
            partial = self._begin(final)
            request = save(sharded_state_dict, str(partial), *args, **kwargs)
            if request is None:
                self._finish(partial, final)
            else:
                request.add_finalize_fn(lambda: self._finish(partial, final))
            return request

        return atomic_save

    def _begin(self, final: Path) -> Path:
        """A new folder beside ``final``, the same on all ranks; what crashes left is removed.

        A new name each time: a writer that outlived its run must not write into this one.
        """
        made: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                if self._lock is not None and not self._lock.exists():
                    raise OSError(f"{final.parent} was removed or replaced since the run started")
                remove_left_overs(final.parent, keep=self._under_way)
                partial = final.with_name(f"{SAVING}{final.name}_{secrets.token_hex(4)}")
                partial.mkdir(parents=True)
                made = [str(partial), None]
            except OSError as error:
                made = [None, f"cannot make a folder for the checkpoint: {error}"]
        dist.broadcast_object_list(made, src=0)
        if made[0] is None:
            raise ValueError(made[1])
        self._under_way.add(Path(made[0]))
        return Path(made[0])

    def _finish(self, partial: Path, final: Path) -> None:
        with together(final):
            if dist.get_rank() == 0:
                put_in_place(partial, final)
        self._under_way.discard(partial)


def put_in_place(partial: Path, final: Path) -> None:
    """Give the complete folder ``partial`` its name; the checkpoint of that name before is removed.

    What others put into the older one's folder comes into the new one's. Killed between the two
    renames, it leaves the old folder aside, for ``recover``.
    """
    for file in partial.iterdir():
        if file.suffix != ".distcp":  # ranks have flushed those that they wrote
            flush(file)
    flush(partial)
    aside = final.with_name(_REPLACED + final.name)
    if final.exists() and any(final.iterdir()):
        _remove_replaced(aside, final)
        final.rename(aside)
    partial.rename(final)  # over an empty folder, too
    flush(final.parent)
    _remove_replaced(aside, final)


def recover(folder: Path) -> None:
    """Put back a checkpoint that was moved aside by a run that died before replacing it.

    For all ranks, before they look at ``folder``; no collectives: the first rank does it.
    """
    for aside, final in _set_aside(folder):
        with suppress(OSError):  # another rank was first
            if not final.exists() or not any(final.iterdir()):
                aside.rename(final)


def remove_left_overs(folder: Path, *, keep: set[Path]) -> None:
    """Remove what saves left that never ended, but for the folders in ``keep``."""
    for partial in folder.glob(f"{SAVING}*"):
        if partial not in keep and _SAVING_NAME.fullmatch(partial.name):
            shutil.rmtree(partial)
    for aside, final in _set_aside(folder):
        if final.exists():
            _remove_replaced(aside, final)


def _set_aside(folder: Path) -> Iterator[tuple[Path, Path]]:
    """The older checkpoints that were moved aside, and where they were."""
    for aside in folder.glob(f"{_REPLACED}*"):
        if _REPLACED_NAME.fullmatch(aside.name):
            yield aside, folder / aside.name.removeprefix(_REPLACED)


def _remove_replaced(aside: Path, final: Path) -> None:
    """Remove an older checkpoint, but for what others put there, which moves into ``final``."""
    if aside.is_symlink():
        aside.unlink()
        return
    if not aside.exists():
        return
    for path in list(aside.iterdir()):
        own = path.suffix == ".distcp" or path.name in _FILES_OF_A_CHECKPOINT
        if not own and not os.path.lexists(final / path.name):
            path.rename(final / path.name)
    shutil.rmtree(aside)


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


@as_wrapper
def told_to_all(
    original: Any, storage_writer: Any, global_metadata: Any, dist_wrapper: Any
) -> None:
    """``save_state_dict_async_finalize`` that raises the same ValueError on every rank.

    Collective as that is: the group of ``dist_wrapper``.
    """
    from torch.distributed.checkpoint import CheckpointException

    told: list[str | None] = [None]
    try:
        original(storage_writer, global_metadata, dist_wrapper)
        return
    except CheckpointException as error:  # on every rank; one knows why
        if error.failures:
            told = ["The checkpoint cannot be written. " + _words(error.failures)]
    dist.broadcast_object_list(told, src=dist_wrapper.coordinator_rank, group=dist_wrapper.group)
    raise ValueError(told[0])


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
