"""Put a recorder into a run, and take it out again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from loongplug.observe.clocks import DeviceClock, HostClock
from loongplug.observe.hooks import PAYLOADS, StepHooks
from loongplug.observe.recorder import NOTHING, Recorder, TraceRecorder
from loongplug.observe.trace_file import TraceWriter
from loongplug.platform import Platform
from loongplug.platform.upstream_tracing import tracing_table


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
    table = tracing_table(_wrappers(hooks))
    table.apply()
    try:
        yield recorder
    finally:
        table.undo()
        hooks.close()
        recorder.close()
        writer.close()


def _wrappers(hooks: StepHooks) -> Mapping[str, Callable[[Any], Any]]:
    training = "megatron.training.training"
    pipeline = "megatron.core.pipeline_parallel"
    transfer = f"{pipeline}.p2p_communication.P2PCommunicator"
    buckets = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
    optimizers = "megatron.core.optimizer.optimizer"
    optimizer = hooks.whole("optimizer")
    plans = "megatron.core.models.common"
    return {
        f"{training}.train_step": hooks.train_step,
        f"{training}.evaluate": hooks.evaluate,
        f"{training}.save_checkpoint_and_time": hooks.whole("checkpoint", "save"),
        f"{pipeline}.schedules.forward_step": hooks.forward_step,
        f"{pipeline}.schedules.backward_step": hooks.backward_step,
        f"{pipeline}.combined_1f1b.combined_forward_backward_step": hooks.combined_step,
        f"{plans}.model_chunk_schedule_plan.TransformerLayerSchedulePlan._build_callable_nodes": (
            hooks.nodes.layer
        ),
        f"{plans}.utils.TransformerLayerNode.backward_dw": hooks.nodes.weights,
        f"{pipeline}.utils.ScheduleNode.stream_acquire_context": hooks.nodes.on_stream,
        f"{transfer}._communicate": hooks.pipeline_transfer,
        f"{transfer}._communicate_shapes": hooks.whole("wait", "shapes"),
        "megatron.core.distributed.finalize_model_grads.finalize_model_grads": hooks.whole(
            "gradients", "finalise gradients"
        ),
        f"{buckets}.finish_grad_sync": hooks.whole("wait", "gradient reduction"),
        f"{buckets}.finish_param_sync": hooks.whole("wait", "parameter gather"),
        **{
            f"{optimizers}.{kind}.step": optimizer
            for kind in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
        },
        **{f"torch.distributed.{name}": hooks.collective for name in PAYLOADS},
    }


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
