"""What is replaced where Megatron saves and loads checkpoints, by how the run saves them."""

import functools
import queue
from collections.abc import Callable
from typing import Any

from loongplug.platform.forked_save import forking_caller, no_worker, results_per_save
from loongplug.platform.replacements import Replacement, ReplacementTable


def _thread_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    results: queue.Queue[Any] = queue.Queue()

    @functools.wraps(original)
    def get_write_results_queue(mp_mode: str = "spawn") -> queue.Queue[Any]:
        return results

    return get_write_results_queue


def synchronous_save_table() -> ReplacementTable:
    """For runs that write their checkpoints within the training process (no ``--async-save``)."""
    return ReplacementTable(
        "synchronous save",
        (
            Replacement(
                target="megatron.core.dist_checkpointing.strategies.filesystem_async."
                "get_write_results_queue",
                wrapper=_thread_queue,
                # Its signature names an object by its address, new in every process.
                reason="starts a process that imports torch, seconds per rank at the first "
                "save, for a queue that only one process's threads use",
            ),
        ),
    )


def asynchronous_save_on_cpu_table() -> ReplacementTable:
    """For CPU runs with ``--async-save``."""
    strategies = "megatron.core.dist_checkpointing.strategies"
    return ReplacementTable(
        "asynchronous save on cpu",
        (
            Replacement(
                target="megatron.training.async_utils.init_persistent_async_worker",
                replacement=no_worker,
                signature="(rank: int, mp_mode: str = 'spawn')",
                reason="starts a process that asks for its CUDA device and ends; training then "
                "waits for it forever",
            ),
            Replacement(
                target=f"{strategies}.async_utils.AsyncCallsQueue._get_async_caller",
                wrapper=forking_caller,
                signature="(self)",
                reason="hands the parameters themselves to that process, in shared memory: it "
                "would write them while training changes them",
            ),
            Replacement(
                target=f"{strategies}.filesystem_async.get_write_results_queue",
                wrapper=results_per_save,
                # Its signature names an object by its address, new in every process.
                reason="starts another process for a queue that all saves share; the results of "
                "two saves under way would be mixed up",
            ),
        ),
    )


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

    ``common`` is the load of what is no tensor, ``rates`` what takes the learning rate's course
    from it, ``tracker`` Python's ``open``; ``write`` writes a rank's files, ``finalize`` wraps
    what all ranks do after that.
    """
    return ReplacementTable(
        "whole checkpoints",
        (
            *_of_saves(save=save, tracker=tracker, write=write, finalize=finalize),
            *_of_loads(load=load, common=common, rates=rates),
        ),
    )


def _of_saves(
    *,
    save: Callable[[Any], Any],
    tracker: Callable[[Any], Any],
    write: Callable[..., None],
    finalize: Callable[[Any], Any],
) -> tuple[Replacement, ...]:
    strategies = "megatron.core.dist_checkpointing.strategies"
    return (
        Replacement(
            target="megatron.core.dist_checkpointing.serialization.save",
            wrapper=save,
            signature="(sharded_state_dict: Dict[str, Any], checkpoint_dir: str, "
            "sharded_strategy: megatron.core.dist_checkpointing.strategies.torch."
            "TorchDistSaveShardedStrategy = None, validate_access_integrity: bool = True, "
            "async_sharded_save: bool = False, preprocess_common_before_consistancy_check: "
            "Optional[Callable[[Dict[str, Any]], Dict[str, Any]]] = None, content_metadata: "
            "Optional[dict] = None, async_strategy: Optional[str] = 'nvrx', "
            "verify_integrity: bool = False) -> Optional["
            "megatron.core.dist_checkpointing.strategies.async_utils.AsyncRequest]",
            reason="writes file by file into the checkpoint's own folder, over what is there",
        ),
        Replacement(
            target="megatron.core.msc_utils.maybe_msc.open",
            wrapper=tracker,  # of Python's own open
            reason="empties the file that names the latest checkpoint before it is written",
        ),
        Replacement(
            target=f"{strategies}.filesystem_async.FileSystemWriterAsync."
            "write_preloaded_data_multithread",
            replacement=staticmethod(write),
            # Its signature names an object by its address, new in every process.
            reason="keeps the class of a writer's error and drops its words; that of a second "
            "file ends the writer before it has told of it",
        ),
        Replacement(
            target=f"{strategies}.state_dict_saver.save_state_dict_async_finalize",
            wrapper=finalize,
            signature="(storage_writer: 'FileSystemWriterAsync', global_metadata: "
            "torch.distributed.checkpoint.metadata.Metadata, dist_wrapper: "
            "torch.distributed.checkpoint.utils._DistWrapper) -> None",
            reason="tells the coordinator alone why a checkpoint could not be written",
        ),
    )


def _of_loads(
    *, load: Callable[[Any], Any], common: Callable[[Any], Any], rates: Callable[[Any], Any]
) -> tuple[Replacement, ...]:
    return (
        Replacement(
            target="megatron.core.dist_checkpointing.serialization.load",
            wrapper=load,
            signature="(sharded_state_dict: Dict[str, Any], checkpoint_dir: str, "
            "sharded_strategy: megatron.core.dist_checkpointing.strategies.torch."
            "TorchDistLoadShardedStrategy = None, validate_access_integrity: bool = True, "
            "strict: Union[str, megatron.core.dist_checkpointing.validation.StrictHandling] = "
            "<StrictHandling.ASSUME_OK_UNEXPECTED: 'assume_ok_unexpected'>, "
            "verify_integrity: bool = False, process_group: "
            "Optional[torch.distributed.distributed_c10d.ProcessGroup] = None) -> "
            "Union[Dict[str, Any], Tuple[Dict[str, Any], Set[str], Set[str]]]",
            reason="ignores tensors that the model does not have, and tells of others by "
            "shards and plans",
        ),
        Replacement(
            target="megatron.core.dist_checkpointing.serialization.load_common_state_dict",
            wrapper=common,
            signature="(checkpoint_dir: Union[str, pathlib.Path]) -> Dict[str, Any]",
            reason="the first that is read of a checkpoint; what follows fails without a "
            "word of the optimizer when its state is of another kind",
        ),
        Replacement(
            target="megatron.core.optimizer_param_scheduler.OptimizerParamScheduler."
            "load_state_dict",
            wrapper=rates,
            signature="(self, state_dict: dict) -> None",
            reason="asserts at the first value that differs, without a word of the flags",
        ),
    )
