"""Every function of Megatron that LoongPlug replaces, each with its reason and signature.

Those that ``--trace`` wraps, only to report their calls, are in ``upstream_tracing.py``.
"""

import functools
import importlib.util
import queue
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loongplug.platform.active import Platform
from loongplug.platform.forked_save import forking_caller, no_worker, results_per_save
from loongplug.platform.replacements import Replacement, ReplacementTable
from loongplug.platform.restart import in_own_store
from loongplug.platform.safe_reading import METADATA_PICKLE, weights_only

PARAMETER_GROUP = "module"  # the key of an optimizer's groups that says whose parameters they have


def _prebuilt_helpers(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


def _without_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(allow_no_cuda: bool = False, *args: Any, **kwargs: Any) -> Any:
        return original(True, *args, **kwargs)

    return initialize_megatron


def _no_stream_order() -> int:
    return 10


def _split_sizes(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


def _uses_torch_adam(optimizer: Any) -> bool:
    """Whether a DistributedOptimizer steps with torch's Adam (neither TE nor Apex is there)."""
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE and optimizer.config.optimizer == "adam"


def _with_adam_state(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        adam = self.optimizer
        if not _uses_torch_adam(self) or adam is None:
            return original(self)
        for group in adam.param_groups:
            for param in group["params"]:
                if not adam.state[param]:
                    adam.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
        if not adam.state:
            # A rank whose shard holds padding only: what it says of the step is not saved.
            adam.state["no parameters"] = {"step": torch.tensor(0.0)}
        return original(self)

    return state_dict


def _with_own_steps(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        if _uses_torch_adam(self) and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    return load_state_dict


def _keeping_step(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    @functools.wraps(original)
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        if _uses_torch_adam(self):
            tensors = {**tensors, "step": None}  # what is no tensor is passed over
        with torch.no_grad():
            original(self, model_param, tensors)

    return set_states


def _with_no_main_params(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        if not any(self.float16_groups):
            state_dict = {"fp32_from_fp16_params": [], **state_dict}
        original(self, state_dict)

    return load_state_dict


def _with_trained_bias(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def linear_with_frozen_weight(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if bias is None or not bias.requires_grad:
            return original(input, weight, bias, *args, **kwargs)
        return original(input, weight, None, *args, **kwargs) + bias

    return linear_with_frozen_weight


def _tensor_by_tensor(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def metadata(args: Any, dp_cp_group: Any = None) -> dict[str, Any]:
        made = original(args, dp_cp_group=dp_cp_group)
        if args.freeze_parameters or args.train_parameters:
            made["singleton_local_shards"] = True
        return made

    return metadata


EVERYWHERE: tuple[Replacement, ...] = (
    Replacement(
        target="megatron.training.initialize._initialize_distributed",
        wrapper=in_own_store,
        signature="(get_embedding_ranks, get_position_embedding_ranks, store, "
        "skip_model_parallel_init=False)",
        reason="leaves the store to torch, which has all of torchrun's attempts use the same keys "
        "of one store: restarted ranks look for each other where the first ones were",
    ),
    Replacement(
        target="megatron.core.datasets.utils.compile_helpers",
        wrapper=_prebuilt_helpers,
        signature="()",
        reason="runs make without the Makefile, which the wheel lacks, although the wheel "
        "brings the helpers built",
    ),
    Replacement(
        target="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.state_dict",
        wrapper=_with_adam_state,
        signature="(self)",
        reason="reads the step from the state of torch's Adam, which has none before the first "
        "step: no checkpoint can be loaded without TE or Apex",
    ),
    Replacement(
        target="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",
        wrapper=_with_own_steps,
        signature="(self, state_dict)",
        reason="leaves torch's Adam with one step tensor for all parameters, which then advances "
        "once for each",
    ),
    Replacement(
        target="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer."
        "_set_main_param_and_optimizer_states",
        wrapper=_keeping_step,
        signature="(self, model_param, tensors)",
        reason="wants the step of torch's Adam among the loaded tensors, and sets the step that "
        "was loaded back; copies into fp32 parameters, which are leaves that require grad",
    ),
    Replacement(
        target="megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params."
        "load_state_dict",
        wrapper=_with_no_main_params,
        signature="(self, state_dict)",
        reason="asks for the fp32 parameters of a rank that has none, and of whose empty list "
        "nothing was saved",
    ),
    Replacement(
        target="megatron.core.tensor_parallel.layers.linear_with_frozen_weight",
        wrapper=_with_trained_bias,
        signature="(input: 'torch.Tensor', weight: 'torch.Tensor', "
        "bias: 'Optional[torch.Tensor]', gradient_accumulation_fusion: 'bool', "
        "allreduce_dgrad: 'bool', sequence_parallel: 'bool', "
        "tp_group: 'Optional[torch.distributed.ProcessGroup]', "
        "grad_output_buffer: 'Optional[List[torch.Tensor]]' = None, "
        "wgrad_deferral_limit: 'None' = None, gtp_remat_size: 'int' = 1) -> 'torch.Tensor'",
        reason="has no gradient for the bias of a frozen weight",
    ),
    Replacement(
        target="megatron.training.checkpointing._build_sharded_state_dict_metadata",
        wrapper=_tensor_by_tensor,
        signature="(args: argparse.Namespace, dp_cp_group: "
        "Optional[torch.distributed.distributed_c10d.ProcessGroup] = None) -> dict",
        reason="saves one tensor for all layers and experts, which are not whole where patterns "
        "freeze some of them; a load reads what the checkpoint says",
    ),
)

SAFE_READING: tuple[Replacement, ...] = (
    Replacement(
        target="torch.distributed.checkpoint.filesystem.pickle",
        replacement=METADATA_PICKLE,
        reason="a checkpoint's .metadata is a pickle, which may run any code",
    ),
    Replacement(
        target="torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.load_bytes",
        wrapper=weights_only,
        signature="(self, read_item: torch.distributed.checkpoint.planner.ReadItem, "
        "value: _io.BytesIO) -> None",
        reason="unpickles whatever is no tensor without torch's weights-only rule",
    ),
)

ON_CPU: tuple[Replacement, ...] = (
    Replacement(
        target="megatron.training.initialize.initialize_megatron",
        wrapper=_without_cuda,
        signature="(allow_no_cuda=False, skip_mpu_initialization=False, "
        "get_embedding_ranks=None, get_position_embedding_ranks=None, store=None, "
        "skip_model_parallel_init=False, seed_pp_group=None, seed_dp_group=None, "
        "seed_tp_group=None, seed_ep_group=None, seed_etp_group=None, skip_random_seed=False)",
        reason="pretrain() calls it without allow_no_cuda, and so refuses a machine without a GPU",
    ),
    Replacement(
        target="megatron.training.utils.common_utils.get_device_arch_version",
        replacement=_no_stream_order,
        signature="()",
        reason="from 10 on upstream does not ask for CUDA_DEVICE_MAX_CONNECTIONS=1, which "
        "orders kernels of several streams",
    ),
    Replacement(
        target="megatron.core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu",
        replacement=_split_sizes,
        signature="(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) "
        "-> torch.Tensor",
        reason="turns split sizes into numbers only when they come from a GPU; gloo's all-to-all "
        "takes no tensors for them",
    ),
)


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
    strategies = "megatron.core.dist_checkpointing.strategies"
    return ReplacementTable(
        "whole checkpoints",
        (
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
        ),
    )


def per_module_data_parallel_table(
    *, wrapper: type, optimizer: Callable[[Any], Any]
) -> ReplacementTable:
    """Let Megatron wrap model chunks with ``wrapper`` and wrap its optimizer's constructor."""
    return ReplacementTable(
        "per-module data parallelism",
        (
            Replacement(
                target="megatron.training.training.DDP",
                replacement=wrapper,
                signature="(config: megatron.core.transformer.transformer_config."
                "TransformerConfig, ddp_config: megatron.core.distributed."
                "distributed_data_parallel_config.DistributedDataParallelConfig, module: "
                "torch.nn.modules.module.Module, disable_bucketing: bool = False, pg_collection: "
                "Optional[megatron.core.process_groups_config.ProcessGroupCollection] = None, "
                "full_param_layout: Optional[megatron.core.optimizer.param_layout."
                "FullParamLayout] = None)",
                reason="puts one wrapper with one data parallel group around a whole chunk",
            ),
            Replacement(
                target="megatron.training.training.get_megatron_optimizer",
                wrapper=optimizer,
                signature="(config: megatron.core.optimizer.optimizer_config.OptimizerConfig, "
                "model_chunks: List[megatron.core.transformer.module.MegatronModule], "
                "config_overrides: Optional[Dict[megatron.core.optimizer.optimizer_config."
                "ParamKey, megatron.core.optimizer_param_scheduler.ParamGroupOverride]] = None, "
                "use_gloo_process_groups: bool = True, pg_collection: Optional["
                "megatron.core.process_groups_config.ProcessGroupCollection] = None, "
                "dump_param_to_param_group_map: Optional[str] = None) -> "
                "megatron.core.optimizer.optimizer.MegatronOptimizer",
                reason="shards all parameters of a chunk over one data parallel group",
            ),
            *(
                Replacement(  # no function: a tuple of names, which the second has a copy of
                    target=f"megatron.core.optimizer.{file}.param_group_identifier_keys",
                    wrapper=lambda names: (PARAMETER_GROUP, *names),
                    reason="knows groups by their settings, which two modules may share",
                )
                for file in ("optimizer", "distrib_optimizer")
            ),
        ),
        importers=(),  # the training loop's own names only
    )


def rates_table(rates: Callable[[Any], Any]) -> ReplacementTable:
    """Wrap the making of the scheduler of learning rate and weight decay."""
    return ReplacementTable(
        "rates",
        (
            Replacement(
                target="megatron.training.training.get_optimizer_param_scheduler",
                wrapper=rates,
                signature="(optimizer)",
                reason="multiplies iterations by one batch size, and steps by those there are",
            ),
        ),
    )


def stepped_schedules_table(schedules: Callable[[Any], Any]) -> ReplacementTable:
    """Wrap the choice of the schedule of a training or evaluation step."""
    return ReplacementTable(
        "stepped schedules",
        (
            Replacement(
                target="megatron.training.training.get_forward_backward_func",
                wrapper=schedules,
                signature="(pp_size: Optional[int] = None, vp_size: Optional[int] = None, "
                "schedule_pg_collection: Optional[megatron.core.process_groups_config."
                "MultiModuleProcessGroupCollection] = None)",
                reason="gives schedules that know of no encoder phases before and after them",
            ),
        ),
        importers=(),  # the training loop's own name only
    )


def apply_upstream_replacements(platform: Platform) -> None:
    """Replace what has to give way in Megatron, until the platform ends; idempotent.

    Imports the targets' modules (``megatron.training`` among them), so call it after
    ``activate``. Raises ReplacementError, with nothing changed, when a target is missing or
    its signature is another than the one its replacement was written for.
    """
    rows = EVERYWHERE + (ON_CPU if platform.name == "cpu" else ())
    platform.use(ReplacementTable("upstream", rows))
    platform.use(ReplacementTable("safe reading", SAFE_READING))


def rank_order_table(order: Sequence[int], *, first_rank: int) -> ReplacementTable:
    """Have Megatron make its groups with the ranks of ``order`` in the place of their own order.

    Nothing is replaced where there is no ``order``.
    """

    def reordered(original: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
        @functools.wraps(original)
        def get_ranks(self: Any, token: str) -> list[list[int]]:
            groups = original(self, token)
            # Ascending: so they are in the groups that torch makes of them.
            return [sorted(order[rank - first_rank] for rank in group) for group in groups]

        return get_ranks

    row = Replacement(
        target="megatron.core.parallel_state.RankGenerator.get_ranks",
        wrapper=reordered,
        signature="(self, token)",
        reason="knows orders of the axes only: none has a tensor parallel group on several stages",
    )
    return ReplacementTable("rank order", (row,) if order else ())


Losses = dict[str, torch.Tensor]


def training_log_table(
    on_iteration: Callable[[int, Losses], None], *, on_evaluation: Callable[[Losses], None]
) -> ReplacementTable:
    """Call ``on_iteration(iteration, losses)`` and ``on_evaluation(losses)`` as training goes.

    They are called after Megatron's own logging of an iteration and after each evaluation, on
    every rank; ``losses`` is empty but on the last pipeline stage.
    """

    def tapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_log(
            loss_dict: Losses,
            total_loss_dict: dict[str, Any],
            learning_rate: float | None,
            iteration: int,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
            on_iteration(iteration, loss_dict)
            return result

        return training_log

    def tapped_evaluation(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            losses, other, timed_out = original(*args, **kwargs)
            if not timed_out:
                on_evaluation(losses)
            return losses, other, timed_out

        return evaluate

    return ReplacementTable(
        "training log",
        (
            Replacement(
                target="megatron.training.training.training_log",
                wrapper=tapped,
                signature="(loss_dict, total_loss_dict, learning_rate: float | None, iteration, "
                "loss_scale, report_memory_flag, skipped_iter, grad_norm, params_norm, "
                "num_zeros_in_grad, max_attention_logit, pg_collection=None, "
                "is_first_iteration=False, seqlen_squared_sum_in_batch: float | None = None, "
                "total_real_tokens_in_batch: float | None = None)",
                reason="the only place that knows every iteration's losses; it has no hook",
            ),
            Replacement(
                target="megatron.training.training.evaluate",
                wrapper=tapped_evaluation,
                signature="(forward_step_func, data_iterator, model, process_non_loss_data_func, "
                "config, verbose=False, non_loss_data_func=None, eval_iters=None, "
                "pg_collection=None, p2p_communicator=None)",
                reason="the only place that knows the validation loss; it has no hook",
            ),
        ),
    )


def setup_table(on_setup: Callable[[list[Any], Any], None]) -> ReplacementTable:
    """Call ``on_setup(model_chunks, optimizer)`` on every rank before the first step.

    The chunks are as training has them: wrapped for data parallelism, their weights loaded.
    """

    def tapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            model, optimizer, scheduler = original(*args, **kwargs)
            on_setup(model, optimizer)
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    return ReplacementTable(
        "setup",
        (
            Replacement(
                target="megatron.training.training.setup_model_and_optimizer",
                wrapper=tapped,
                signature="(model_type, model_provider_func=None, checkpointing_context=None, *, "
                "cfg_container: "
                "megatron.training.config.container.PretrainConfigContainer | None = "
                "None, pg_collection: "
                "megatron.core.process_groups_config.ProcessGroupCollection | "
                "megatron.core.process_groups_config.MultiModuleProcessGroupCollection "
                "| None = None)",
                reason="the only place that has the optimizer before training; it has no hook",
            ),
        ),
    )
