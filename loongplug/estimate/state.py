"""What a rank holds between steps: weights, gradient buffers, optimizer state.

Everything is counted by Megatron's own plan of its buffers, from parameters on the meta device.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.training import get_megatron_ddp_config, resolve_ddp_bucket_size
from torch import nn

from loongplug.models.multimodal import MultimodalModel
from loongplug.parallel.module_state import ModulePart

_WIDE = torch.float32.itemsize


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes. ``step`` is what the optimizer's step takes besides, for its duration."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    step: int = 0

    def __add__(self, other: "State") -> "State":
        first = zip(astuple(self)[:3], astuple(other)[:3], strict=True)
        weights, gradients, optimizer = (sum(pair) for pair in first)
        return State(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            step=max(self.step, other.step),  # modules step one after the other
        )


def rank_state(chunks: Sequence[MultimodalModel], args: Namespace) -> dict[str, State]:
    """The state of this rank's chunks by the part of the model: ``image_encoder``, the decoder.

    No collectives, but Megatron's parallel state has to be there.
    """
    found: dict[str, State] = {}
    for number, chunk in enumerate(chunks):
        for part in chunk.parallel_parts():
            with part.state.entered():
                state = _part_state(part, args, first_chunk=number == 0)
            found[part.name] = found.get(part.name, State()) + state
    return found


def _part_state(part: ModulePart, args: Namespace, *, first_chunk: bool) -> State:
    tensors = {id(each): each for each in _tensors(part.modules.values())}.values()
    trained = [each for each in tensors if each.requires_grad]
    frozen = sum(each.nbytes for each in tensors if not each.requires_grad)
    state = State(weights=frozen)
    for buffer in _buffers(trained, part.state.groups, args, first_chunk=first_chunk):
        state += buffer
    return state


def _tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def _buffers(
    trained: list[torch.Tensor],
    groups: ProcessGroupCollection,
    args: Namespace,
    *,
    first_chunk: bool,
) -> Iterator[State]:
    """One for each of Megatron's gradient buffers."""
    config = get_megatron_ddp_config(args)
    if not args.use_distributed_optimizer:
        for key, (params, _) in group_params_for_buffers(
            trained, config.grad_reduce_in_fp32
        ).items():
            sizes = [each.numel() for each in params]
            yield State(
                weights=sum(sizes) * key.param_dtype.itemsize,
                gradients=sum(sizes) * key.grad_dtype.itemsize,
                optimizer=sum(sizes) * _kept_by_optimizer(key.param_dtype, args),
                step=_step(sizes, key.param_dtype, key.grad_dtype),
            )
        return
    single = not first_chunk or args.overlap_param_gather_with_optimizer_step
    bucket = resolve_ddp_bucket_size(
        config, groups.dp_cp, config.overlap_grad_reduce, sum(each.numel() for each in trained)
    )
    layout = DistributedOptimizer.compute_full_param_layout(
        trained,
        None if single or groups.pp.rank() > 0 else bucket,
        groups.intra_dp_cp.size(),
        config,
        expert_data_parallel_world_size=groups.intra_expt_dp.size(),
    )
    for key, plan in layout.layouts.items():
        replicas = groups.intra_expt_dp if key.is_expert_parallel else groups.intra_dp_cp
        padded = plan.bucket_indices[-1][1]
        sizes = [
            size
            for start, end, number in plan.param_index_map.values()
            if (size := _own(start, end, plan.bucket_indices[number], replicas)) > 0
        ]
        yield State(
            weights=padded * key.param_dtype.itemsize,
            gradients=padded * key.grad_dtype.itemsize,
            optimizer=sum(sizes) * _kept_by_optimizer(key.param_dtype, args),
            step=_step(sizes, key.param_dtype, key.grad_dtype),
        )


def _own(
    start: int, end: int, bucket: tuple[int, int], replicas: torch.distributed.ProcessGroup
) -> int:
    """How many of the elements from ``start`` to ``end`` lie in this rank's shard of the bucket."""
    first, behind = bucket
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
    return main + moments


def _step(sizes: Sequence[int], parameter: torch.dtype, gradient: torch.dtype) -> int:
    """Gradients as the optimizer takes them, and Adam's work on one tensor."""
    copies = 0 if gradient == torch.float32 else sum(sizes) * _WIDE
    return copies + 2 * max(sizes, default=0) * _WIDE
