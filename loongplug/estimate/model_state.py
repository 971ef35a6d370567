"""What a rank holds between steps: weights, gradient buffers, optimizer state.

Everything is counted by Megatron's own plan of its buffers, from parameters on the meta device.
"""

from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.param_layout import PerBufferParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.training import get_megatron_ddp_config, resolve_ddp_bucket_size
from torch import nn

from loongplug.estimate.live_bytes import GRADIENTS, OPTIMIZER, WEIGHTS
from loongplug.models.multimodal import MultimodalModel
from loongplug.parallel.module_ddp import part_layout

_WIDE = torch.float32.itemsize

# How an optimizer goes through its tensors: in place (Adam, TransformerEngine's, Apex's or torch's
# fused one), or with decayed gradients of their own: of all at once (torch's SGD on GPUs), or of
# one after the other (on the CPU).
Stepping = Literal["fused", "all at once", "one by one"]


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes. ``copies`` and ``work`` are there in the optimizer's step only.

    All optimizers' gradients are copied before the first one steps, and stay until they are zeroed
    for the next step; then one works after another.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    copies: int = 0
    work: int = 0

    def __add__(self, other: "State") -> "State":
        return State(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            copies=self.copies + other.copies,
            work=max(self.work, other.work),
        )

    def by_name(self) -> dict[str, int]:
        """What there is between steps."""
        return {WEIGHTS: self.weights, GRADIENTS: self.gradients, OPTIMIZER: self.optimizer}

    @property
    def step(self) -> int:
        """The bytes that the optimizer's step takes besides."""
        return self.copies + self.work


@dataclass(frozen=True, kw_only=True)
class _Buffer:
    """One of Megatron's gradient buffers: its dtypes and length, and what this rank steps of it."""

    parameter: torch.dtype
    gradient: torch.dtype
    expert: bool
    length: int
    stepped: tuple[int, ...]  # elements of each tensor


def rank_state(
    chunks: Sequence[MultimodalModel], args: Namespace, *, stepping: Stepping
) -> dict[str, State]:
    """The state of this rank's chunks by the names of entries.

    No collectives, but Megatron's parallel state has to be there.
    """
    config = get_megatron_ddp_config(args)
    config.bucket_size = resolve_ddp_bucket_size(
        config,
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        config.overlap_grad_reduce,
        sum(each.numel() for chunk in chunks for each in chunk.parameters()),
    )
    frozen: Counter[str] = Counter()
    buffers: defaultdict[str, list[_Buffer]] = defaultdict(list)
    for number, chunk in enumerate(chunks):
        for part in chunk.parallel_parts():
            modules = nn.ModuleList(part.modules.values())
            tensors = [*modules.parameters(), *modules.buffers()]
            frozen[part.name] += sum(each.nbytes for each in tensors if not each.requires_grad)
            if part.state is not None:
                single = number > 0 or args.overlap_param_gather_with_optimizer_step
                with part.state.entered():
                    buffers[part.name] += _buffers(
                        modules, config, groups=part.state.groups, single=single
                    )
    return {
        name: State(weights=nbytes) + _trained(buffers[name], args, stepping=stepping)
        for name, nbytes in frozen.items()
    }


def _trained(buffers: Sequence[_Buffer], args: Namespace, *, stepping: Stepping) -> State:
    """The state of a part that trains: its experts have an optimizer, and the rest has one."""
    optimizers = [[each for each in buffers if each.expert is expert] for expert in (False, True)]
    return State(
        weights=sum(each.length * each.parameter.itemsize for each in buffers),
        gradients=sum(each.length * each.gradient.itemsize for each in buffers),
        optimizer=sum(
            sum(each.stepped) * _kept_by_optimizer(each.parameter, args) for each in buffers
        ),
        copies=sum(
            sum(each.stepped) * _WIDE
            for each in buffers
            if each.gradient != torch.float32 and not args.use_precision_aware_optimizer
        ),
        work=max(
            _work([size for each in own for size in each.stepped], args, stepping=stepping)
            for own in optimizers
        ),
    )


def _buffers(
    modules: nn.Module,
    config: DistributedDataParallelConfig,
    *,
    groups: ProcessGroupCollection,
    single: bool,
) -> Iterator[_Buffer]:
    trained = [each for each in modules.parameters() if each.requires_grad]
    layout = part_layout(modules, ddp_config=config, groups=groups, single=single)
    for key, (tensors, _) in group_params_for_buffers(trained, config.grad_reduce_in_fp32).items():
        stepped = [each.numel() for each in tensors]
        length = sum(stepped)
        if layout is not None:
            plan = layout.layouts[key]
            replicas = groups.intra_expt_dp if key.is_expert_parallel else groups.intra_dp_cp
            stepped = [_own(plan, each, replicas) for each in tensors]
            length = plan.bucket_indices[-1][1]
        yield _Buffer(
            parameter=key.param_dtype,
            gradient=key.grad_dtype,
            expert=key.is_expert_parallel,
            length=length,
            stepped=tuple(filter(None, stepped)),
        )


def _own(
    plan: PerBufferParamLayout, tensor: torch.Tensor, replicas: torch.distributed.ProcessGroup
) -> int:
    """How many of the tensor's elements lie in this rank's shard of their bucket."""
    start, end, number = plan.param_index_map[tensor]
    first, behind = plan.bucket_indices[number]
    share = (behind - first) // replicas.size()
    mine = first + share * replicas.rank()
    return max(0, min(end, mine + share) - max(start, mine))


def _kept_by_optimizer(dtype: torch.dtype, args: Namespace) -> int:
    """Bytes per element of a parameter that the optimizer steps."""
    moments = 2 * _WIDE
    main = 0 if dtype == torch.float32 else _WIDE
    if args.optimizer == "sgd":
        moments = _WIDE if args.sgd_momentum else 0
    elif args.use_precision_aware_optimizer:
        moments = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
        main = args.main_params_dtype.itemsize
        if (dtype, args.main_params_dtype) == (torch.bfloat16, torch.float32) and (
            not args.optimizer_cpu_offload
        ):
            main = _WIDE - dtype.itemsize  # TransformerEngine's has the bits that the weights lack
    return main + moments


def _work(sizes: Sequence[int], args: Namespace, *, stepping: Stepping) -> int:
    """What one optimizer makes of its tensors, of these sizes, while it steps."""
    if args.use_precision_aware_optimizer:
        kinds = (args.exp_avg_dtype, args.exp_avg_sq_dtype, args.main_params_dtype)
        return sum(sizes) * _WIDE * sum(dtype != torch.float32 for dtype in kinds)
    if stepping == "fused" or not args.weight_decay:
        return 0
    if stepping == "all at once":
        return sum(sizes) * _WIDE
    return _WIDE * max(sizes, default=0)
