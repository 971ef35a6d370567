"""What is replaced where Megatron saves and loads checkpoints, by how the run saves them."""

import pickle
import queue
import tempfile
from collections.abc import Callable
from typing import Any

from loongplug.platform.replacements import Replacement, ReplacementTable
from loongplug.platform.uninterrupted_forks import signals_wait

_CHECKPOINTS = "megatron.core.dist_checkpointing"
_STRATEGIES = f"{_CHECKPOINTS}.strategies"


def synchronous_save_table() -> ReplacementTable:
    """The table of runs that save within the training process (no ``--async-save``)."""
    results: queue.Queue[Any] = queue.Queue()
    row = _results_queue(
        lambda mp_mode="spawn": results,
        reason="starts a process that imports torch, seconds per rank at the first save, for a "
        "queue that only one process's threads use",
    )
    return ReplacementTable("synchronous save", (row,))


def asynchronous_save_on_cpu_table() -> ReplacementTable:
    """The table of CPU runs with ``--async-save``: each save is written by a fork of its rank.

    The fork has the memory as it was, without a copy, while training goes on.
    """
    return ReplacementTable(
        "asynchronous save on cpu",
        (
            Replacement(
                target="megatron.training.async_utils.init_persistent_async_worker",
                replacement=lambda rank, mp_mode="spawn": None,
                parameters="(rank, mp_mode)",
                reason="starts a process that asks for its CUDA device and ends; training then "
                "waits for it forever",
            ),
            Replacement(
                target=f"{_STRATEGIES}.async_utils.AsyncCallsQueue._get_async_caller",
                replacement=_forking_caller,
                parameters="(self)",
                reason="hands the parameters themselves to that process, in shared memory: it "
                "would write them while training changes them",
            ),
            _results_queue(
                lambda mp_mode="spawn": ForkedResults(),
                reason="starts another process for a queue that all saves share; the results of "
                "two saves under way would be mixed up",
            ),
        ),
    )


def _results_queue(replacement: Callable[..., Any], *, reason: str) -> Replacement:
    return Replacement(
        target=f"{_STRATEGIES}.filesystem_async.get_write_results_queue",
        replacement=replacement,
        parameters="(mp_mode)",
        reason=reason,
    )


def _forking_caller(queue_of_calls: Any) -> Any:
    from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

    class ForkingCaller(TemporalAsyncCaller):
        def schedule_async_call(self, async_req: Any) -> None:
            with signals_wait():
                super().schedule_async_call(async_req)

    return ForkingCaller()


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


def whole_checkpoints_table(
    *,
    save: Callable[[Any], Any],
    load: Callable[[Any], Any],
    common: Callable[[Any], Any],
    rates: Callable[[Any], Any],
    tracker: Callable[[Any], Any],
    write: Callable[..., None],
    finalize: Callable[[Any], Any],
) -> ReplacementTable:
    """Wrap the save and the load of one checkpoint, and what takes part in them.

    ``common`` is the load of what is not a tensor, ``rates`` what takes the learning rate's course
    from it, ``tracker`` Python's ``open``; ``write`` writes a rank's files, ``finalize`` wraps
    what all ranks do after that.
    """
    rows = (
        Replacement(
            target=f"{_CHECKPOINTS}.serialization.save",
            wrapper=save,
            parameters="(sharded_state_dict, checkpoint_dir, sharded_strategy, "
            "validate_access_integrity, async_sharded_save, "
            "preprocess_common_before_consistancy_check, content_metadata, async_strategy, "
            "verify_integrity)",
            reason="writes file by file into the checkpoint's own folder, over what is there",
        ),
        Replacement(
            target="megatron.core.msc_utils.maybe_msc.open",
            wrapper=tracker,  # of Python's own open
            reason="empties the file that names the latest checkpoint before it is written",
        ),
        Replacement(
            target=f"{_STRATEGIES}.filesystem_async.FileSystemWriterAsync."
            "write_preloaded_data_multithread",
            replacement=staticmethod(write),
            parameters="(transform_list, use_msc, rank, write_buckets, global_results_queue)",
            reason="keeps the class of a writer's error and drops its words; that of a second "
            "file ends the writer before it has told of it",
        ),
        Replacement(
            target=f"{_STRATEGIES}.state_dict_saver.save_state_dict_async_finalize",
            wrapper=finalize,
            parameters="(storage_writer, global_metadata, dist_wrapper)",
            reason="tells the coordinator alone why a checkpoint could not be written",
        ),
        Replacement(
            target=f"{_CHECKPOINTS}.serialization.load",
            wrapper=load,
            parameters="(sharded_state_dict, checkpoint_dir, sharded_strategy, "
            "validate_access_integrity, strict, verify_integrity, process_group)",
            reason="ignores tensors that the model does not have, and tells of others by "
            "shards and plans",
        ),
        Replacement(
            target=f"{_CHECKPOINTS}.serialization.load_common_state_dict",
            wrapper=common,
            parameters="(checkpoint_dir)",
            reason="the first that is read of a checkpoint; what follows fails without a "
            "word of the optimizer when its state is of another kind",
        ),
        Replacement(
            target="megatron.core.optimizer_param_scheduler.OptimizerParamScheduler."
            "load_state_dict",
            wrapper=rates,
            parameters="(self, state_dict)",
            reason="asserts at the first value that differs, without a word of the flags",
        ),
    )
    return ReplacementTable("whole checkpoints", rows)
