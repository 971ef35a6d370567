"""What every run has to put right in Megatron, each with its reason and parameters.

What gives our own code its place in Megatron's is in ``upstream_seams.py`` and, for checkpoints, in
``upstream_saving.py``; what ``--trace`` wraps to report its calls in ``observe/tracing.py``.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from loongplug.platform.finite_values import norms_before_sums
from loongplug.platform.multi_tensor import OF_GRADIENTS
from loongplug.platform.platforms import Platform
from loongplug.platform.replacements import Replacement, ReplacementTable, as_wrapper
from loongplug.platform.safe_reading import METADATA_PICKLE, naming_files, weights_only


def store_of_attempt() -> Store | None:
    """torchrun's store with the keys of this attempt; None in a first one, or without torchrun.

    A new connection; MASTER_ADDR and MASTER_PORT say where.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"loongplug/attempt/{attempt}", store)


@as_wrapper
def _in_own_store(
    original: Any, embedding_ranks: Any, position_ranks: Any, store: Any, **options: Any
) -> Any:
    return original(embedding_ranks, position_ranks, store or store_of_attempt(), **options)


@as_wrapper
def _without_cuda(original: Any, allow_no_cuda: bool = False, *args: Any, **kwargs: Any) -> Any:
    return original(True, *args, **kwargs)


def _split_sizes(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


def _uses_torch_adam(optimizer: Any) -> bool:
    """Whether a DistributedOptimizer steps with torch's Adam (neither TE nor Apex is there)."""
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE and optimizer.config.optimizer == "adam"


@as_wrapper
def _with_adam_state(original: Any, self: Any) -> Any:
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


@as_wrapper
def _with_own_steps(original: Any, self: Any, state_dict: Any) -> None:
    original(self, state_dict)
    if _uses_torch_adam(self) and self.optimizer is not None:
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()


@as_wrapper
def _keeping_step(
    original: Any, self: Any, model_param: torch.Tensor, tensors: dict[str, Any]
) -> None:
    if _uses_torch_adam(self):
        tensors = {**tensors, "step": None}  # what is not a tensor is passed over
    with torch.no_grad():
        original(self, model_param, tensors)


@as_wrapper
def _with_no_main_params(original: Any, self: Any, state_dict: Any) -> None:
    if not any(self.float16_groups):
        state_dict = {"fp32_from_fp16_params": [], **state_dict}
    original(self, state_dict)


@as_wrapper
def _with_trained_bias(
    original: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if bias is None or not bias.requires_grad:
        return original(input, weight, bias, *args, **kwargs)
    return original(input, weight, None, *args, **kwargs) + bias


@as_wrapper
def _tensor_by_tensor(original: Any, args: Any, dp_cp_group: Any = None) -> dict[str, Any]:
    made = original(args, dp_cp_group=dp_cp_group)
    if args.freeze_parameters or args.train_parameters:
        made["singleton_local_shards"] = True
    return made


def _read_once(
    original: Callable[[Any, type], dict[str, str]],
) -> Callable[[Any, type], dict[str, str]]:
    known: dict[type, dict[str, str]] = {}

    @functools.wraps(original)
    def of_class(self: Any, src_cfg_class: type) -> dict[str, str]:
        if src_cfg_class not in known:
            known[src_cfg_class] = original(self, src_cfg_class)
        return dict(known[src_cfg_class])

    return of_class


EVERYWHERE: tuple[Replacement, ...] = (
    Replacement(
        target="megatron.training.argument_utils.ArgumentGroupFactory._get_field_docstrings",
        wrapper=_read_once,
        parameters="(self, src_cfg_class)",
        reason="parses the source of every config class each time that flags are parsed: a quarter "
        "of the time in which a rank starts",
    ),
    Replacement(
        target="megatron.training.initialize._initialize_distributed",
        wrapper=_in_own_store,
        parameters="(get_embedding_ranks, get_position_embedding_ranks, store, "
        "skip_model_parallel_init)",
        reason="leaves the store to torch, which has all of torchrun's attempts use the same keys "
        "of one store: restarted ranks look for each other where the first ones were",
    ),
    Replacement(
        target="megatron.core.datasets.utils.compile_helpers",
        replacement=lambda: None,
        parameters="()",
        reason="runs make without the Makefile, which the wheel lacks, although the wheel "
        "brings the helpers built",
    ),
    Replacement(
        target="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.state_dict",
        wrapper=_with_adam_state,
        parameters="(self)",
        reason="reads the step from the state of torch's Adam, which has none before the first "
        "step: no checkpoint can be loaded without TE or Apex",
    ),
    Replacement(
        target="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",
        wrapper=_with_own_steps,
        parameters="(self, state_dict)",
        reason="leaves torch's Adam with one step tensor for all parameters, which then advances "
        "once for each",
    ),
    Replacement(
        target="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer."
        "_set_main_param_and_optimizer_states",
        wrapper=_keeping_step,
        parameters="(self, model_param, tensors)",
        reason="wants the step of torch's Adam among the loaded tensors, and sets the step that "
        "was loaded back; copies into fp32 parameters, which are leaves that require grad",
    ),
    Replacement(
        target="megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params."
        "load_state_dict",
        wrapper=_with_no_main_params,
        parameters="(self, state_dict)",
        reason="asks for the fp32 parameters of a rank that has none, and of whose empty list "
        "nothing was saved",
    ),
    Replacement(
        target="megatron.core.tensor_parallel.layers.linear_with_frozen_weight",
        wrapper=_with_trained_bias,
        parameters="(input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, "
        "sequence_parallel, tp_group, grad_output_buffer, wgrad_deferral_limit, gtp_remat_size)",
        reason="has no gradient for the bias of a frozen weight",
    ),
    Replacement(
        target="megatron.training.checkpointing._build_sharded_state_dict_metadata",
        wrapper=_tensor_by_tensor,
        parameters="(args, dp_cp_group)",
        reason="saves one tensor for all layers and experts, which are not whole where patterns "
        "freeze some of them; a load reads what the checkpoint says",
    ),
    Replacement(
        target="megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup."
        "check_grads",
        wrapper=norms_before_sums,
        parameters="(self, check_for_nan_or_inf, check_for_large)",
        reason="has the host wait in the middle of a backward, and says the number of a bucket, of "
        "which nobody knows the module",
    ),
    *OF_GRADIENTS,
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
        parameters="(self, read_item, value)",
        reason="unpickles whatever is not a tensor without torch's weights-only rule",
    ),
    Replacement(
        target="torch.distributed.checkpoint.filesystem.FileSystemReader.read_data",
        wrapper=naming_files,
        parameters="(self, plan, planner)",
        reason="tells of a damaged file by what its reader came across, without its name",
    ),
)

ON_CPU: tuple[Replacement, ...] = (
    Replacement(
        target="megatron.training.initialize.initialize_megatron",
        wrapper=_without_cuda,
        parameters="(allow_no_cuda, skip_mpu_initialization, get_embedding_ranks, "
        "get_position_embedding_ranks, store, skip_model_parallel_init, seed_pp_group, "
        "seed_dp_group, seed_tp_group, seed_ep_group, seed_etp_group, skip_random_seed)",
        reason="pretrain() calls it without allow_no_cuda, and so refuses a machine without a GPU",
    ),
    Replacement(
        target="megatron.training.utils.common_utils.get_device_arch_version",
        replacement=lambda: 10,
        parameters="()",
        reason="from 10 on upstream does not ask for CUDA_DEVICE_MAX_CONNECTIONS=1, which "
        "orders kernels of several streams",
    ),
    Replacement(
        target="megatron.core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu",
        replacement=_split_sizes,
        parameters="(tensor, as_numpy, record_stream)",
        reason="turns split sizes into numbers only when they come from a GPU; gloo's all-to-all "
        "takes no tensors for them",
    ),
)


def apply_upstream_replacements(platform: Platform) -> None:
    """Replace what has to give way in Megatron, until the platform ends; idempotent.

    Imports the targets' modules (``megatron.training`` among them), so call it after
    ``activate``. Raises ReplacementError, with nothing changed, when a target is missing or
    its parameters are others than those its replacement was written for.
    """
    rows = EVERYWHERE + (ON_CPU if platform.name == "cpu" else ())
    platform.use(ReplacementTable("upstream", rows))
    platform.use(ReplacementTable("safe reading", SAFE_READING))
