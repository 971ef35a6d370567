"""Put a recorder into a run, and take it out again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from loongplug.observe.clocks import DeviceClock, HostClock
from loongplug.observe.hooks import PAYLOADS, StepHooks
from loongplug.observe.recorder import NOTHING, Recorder, TraceRecorder
from loongplug.observe.trace_file import TraceWriter
from loongplug.platform import Platform
from loongplug.platform.replacements import Replacement, ReplacementTable

_TRAINING = "megatron.training.training"
_PIPELINE = "megatron.core.pipeline_parallel"
_TRANSFER = f"{_PIPELINE}.p2p_communication.P2PCommunicator"
_GRADIENTS = "megatron.core.distributed.finalize_model_grads"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_OPTIMIZERS = "megatron.core.optimizer.optimizer"
_NO_HOOK = "reports its calls; there is no hook for it"

_Wrapper = Callable[[Any], Any]


@contextmanager
def traced(
    folder: str | None,
    *,
    platform: Platform,
    rank: int,
    world_size: int,
    module: Callable[[], str | None] = lambda: None,
) -> Iterator[Recorder]:
    """While entered, this rank's events go to a file of ``folder``; None: nothing is done at all.

    Gives the recorder, for what is to report beside Megatron's own functions. Local: ranks do not
    wait for each other. ``module``, asked when the first model is there, names the one that has
    this rank for itself. Raises ValueError when the file cannot be made.
    """
    if folder is None:
        yield NOTHING
        return
    writer = TraceWriter(Path(folder), rank=rank, world_size=world_size, device=platform.name)
    recorder = TraceRecorder(writer.write)

    def on_first_model() -> None:
        writer.place(_place(module()))
        if platform.name == "cuda":
            recorder.use_device_clock(DeviceClock(HostClock()))

    hooks = StepHooks(recorder, on_first_model=on_first_model)
    table = _table(hooks)
    table.apply()
    try:
        yield recorder
    finally:
        table.undo()
        hooks.close()
        recorder.close()
        writer.close()


def _table(hooks: StepHooks) -> ReplacementTable:
    """Functions of Megatron and of ``torch.distributed``, which report their calls.

    isend and irecv stay: ``P2POp`` takes none but torch's own.
    """
    # Those whose wrappers know parameters by name, with the parameters they were written for.
    by_name: dict[str, tuple[_Wrapper, str]] = {
        f"{_TRAINING}.train_step": (
            hooks.train_step,
            "(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, "
            "forward_backward_func, iteration, pg_collection, p2p_communicator)",
        ),
        f"{_TRAINING}.evaluate": (
            hooks.evaluate,
            "(forward_step_func, data_iterator, model, process_non_loss_data_func, config, "
            "verbose, non_loss_data_func, eval_iters, pg_collection, p2p_communicator)",
        ),
        f"{_PIPELINE}.schedules.forward_step": (
            hooks.forward_step,
            "(forward_step_func, data_iterator, model, num_microbatches, input_tensor, "
            "forward_data_store, config, cp_group_size, collect_non_loss_data, "
            "checkpoint_activations_microbatch, is_first_microbatch, current_microbatch, "
            "vp_stage, is_last_stage)",
        ),
        f"{_PIPELINE}.schedules.backward_step": (
            hooks.backward_step,
            "(input_tensor, output_tensor, output_tensor_grad, config)",
        ),
        f"{_PIPELINE}.combined_1f1b.combined_forward_backward_step": (
            hooks.combined_step,
            "(forward_step_func, data_iterator, f_model, num_microbatches, input_tensor, "
            "forward_data_store, b_model, b_input_tensor, b_output_tensor, b_output_tensor_grad, "
            "config, f_model_chunk_id, pre_forward, pre_backward, post_forward, post_backward, "
            "collect_non_loss_data, checkpoint_activations_microbatch, is_first_microbatch, "
            "current_microbatch, encoder_decoder_xattn, fsdp_wrapper)",
        ),
        f"{_TRANSFER}._communicate": (
            hooks.pipeline_transfer,
            "(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, "
            "wait_on_reqs)",
        ),
    }
    optimizer = hooks.whole("optimizer")
    as_a_whole: dict[str, _Wrapper] = {
        f"{_TRAINING}.save_checkpoint_and_time": hooks.whole("checkpoint", "save"),
        f"{_TRANSFER}._communicate_shapes": hooks.whole("wait", "shapes"),
        f"{_GRADIENTS}.finalize_model_grads": hooks.whole("gradients", "finalise gradients"),
        f"{_BUCKETS}.finish_grad_sync": hooks.whole("wait", "gradient reduction"),
        f"{_BUCKETS}.finish_param_sync": hooks.whole("wait", "parameter gather"),
        f"{_OPTIMIZERS}.MixedPrecisionOptimizer.step": optimizer,
        f"{_OPTIMIZERS}.FP32Optimizer.step": optimizer,
        f"{_OPTIMIZERS}.ChainedOptimizer.step": optimizer,
        **{f"torch.distributed.{name}": hooks.collective for name in PAYLOADS},
    }
    whole = {target: (wrapper, None) for target, wrapper in as_a_whole.items()}
    rows = tuple(
        Replacement(target=target, wrapper=wrapper, parameters=parameters, reason=_NO_HOOK)
        for target, (wrapper, parameters) in (by_name | whole).items()
    )
    return ReplacementTable("tracing", rows, importers=("megatron", "loongplug"))


def _place(module: str | None) -> dict[str, int]:
    """This rank's coordinates in the decoder's layout, or in that of its own ``module``."""
    cp = {"cp": parallel_state.get_context_parallel_rank()}
    shared = parallel_state.get_context_parallel_world_size() > 1
    return {
        "tp" if module is None else f"{module} tp": parallel_state.get_tensor_model_parallel_rank(),
        **(cp if shared else {}),  # of ranks that share rows
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
    }
