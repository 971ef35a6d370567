"""Put a recorder into a run, and take it out again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron.core import parallel_state

from loongplug.observe.hooks import PAYLOADS, Around, StepHooks, reported
from loongplug.observe.recorder import NOTHING, Recorder, TraceRecorder
from loongplug.observe.trace_file import TraceWriter
from loongplug.platform.platforms import Platform
from loongplug.platform.replacements import Replacement, ReplacementTable

_TRAINING = "megatron.training.training"
_PIPELINE = "megatron.core.pipeline_parallel"
_TRANSFER = f"{_PIPELINE}.p2p_communication.P2PCommunicator"
_GRADIENTS = "megatron.core.distributed.finalize_model_grads"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_OPTIMIZERS = ("MixedPrecisionOptimizer.step", "FP32Optimizer.step", "ChainedOptimizer.step")
_NO_HOOK = "reports its calls; there is no hook for it"


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

    Gives the recorder, for what is to report beside Megatron's own functions. ``module``, asked
    when the first model is there, names the one that has this rank for itself.
    """
    if folder is None:
        yield NOTHING
        return
    writer = TraceWriter(Path(folder), rank=rank, world_size=world_size, device=platform.name)
    recorder = TraceRecorder(writer.write)

    def on_first_model() -> None:
        writer.place(_place(module()))
        if platform.name == "cuda":
            recorder.use_device_clock()

    hooks = StepHooks(recorder, on_first_model=on_first_model)
    table = _table(hooks)
    table.apply()
    try:
        yield recorder
    finally:
        table.undo()
        hooks.modules.close()
        recorder.close()
        writer.close()


def _table(hooks: StepHooks) -> ReplacementTable:
    """Functions of Megatron and of ``torch.distributed``, which report their calls.

    isend and irecv stay: ``P2POp`` takes none but torch's own.
    """
    around: dict[str, Around] = {
        f"{_TRAINING}.train_step": hooks.train_step,
        f"{_TRAINING}.evaluate": hooks.evaluate,
        f"{_TRAINING}.save_checkpoint_and_time": hooks.whole("checkpoint", "save"),
        f"{_PIPELINE}.schedules.forward_step": hooks.forward_step,
        f"{_PIPELINE}.schedules.backward_step": hooks.backward_step,
        f"{_PIPELINE}.combined_1f1b.combined_forward_backward_step": hooks.combined_step,
        f"{_TRANSFER}._communicate": hooks.pipeline_transfer,
        f"{_TRANSFER}._communicate_shapes": hooks.whole("wait", "shapes"),
        f"{_GRADIENTS}.finalize_model_grads": hooks.whole("gradients", "finalise gradients"),
        f"{_BUCKETS}.finish_grad_sync": hooks.whole("wait", "gradient reduction"),
        f"{_BUCKETS}.finish_param_sync": hooks.whole("wait", "parameter gather"),
        **{
            f"megatron.core.optimizer.optimizer.{step}": hooks.whole("optimizer", step)
            for step in _OPTIMIZERS
        },
        **{f"torch.distributed.{name}": hooks.collective(name) for name in PAYLOADS},
    }
    rows = [
        Replacement(target=target, wrapper=partial(reported, around=each), reason=_NO_HOOK)
        for target, each in around.items()
    ]
    return ReplacementTable("tracing", rows, importers=("megatron", "loongplug"))


def _place(module: str | None) -> dict[str, int]:
    """This rank's coordinates in the decoder's layout, or in that of its own ``module``."""
    place = {
        "tp" if module is None else f"{module} tp": parallel_state.get_tensor_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
    }
    if parallel_state.get_context_parallel_world_size() == 1:
        del place["cp"]
    return place
