"""What a rank's optimizer and gradient buffers hold, in whole parameters.

A distributed optimizer leaves a data parallel rank with its own share of each: here the shares are
put together again. A model chunk may have any number of wrappers with gradient buffers, each with
data parallel groups of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

States = dict[str, Tensor]


def gather_gradient_shards(chunks: Sequence[nn.Module]) -> None:
    """Make every ``main_grad`` whole and reduced on every rank.

    What is overwritten are the shares of other ranks, which nobody reads before the buffers are
    zeroed for the next step. Collective: the data parallel groups of all buffers.
    """
    for group in _bucket_groups(chunks):
        if not group.ddp_config.use_distributed_optimizer:
            continue
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            whole = bucket.grad_data
            share = whole.chunk(ranks.size())[ranks.rank()]
            dist.all_gather_into_tensor(whole, share.clone(), group=ranks)


def _bucket_groups(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    """Each group of gradient buckets once, whichever wrapper owns it."""
    seen: set[int] = set()
    for chunk in chunks:
        for module in chunk.modules():
            for name in ("bucket_groups", "expert_parallel_bucket_groups"):
                for group in getattr(module, name, ()):
                    if id(group) not in seen:
                        seen.add(id(group))
                        yield group


def single_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, however deep."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        return [optimizer]
    return [single for each in chained for single in single_optimizers(each)]


def learning_rate(optimizer: Any) -> float:
    """The highest rate of any parameter group on this rank."""
    rates = [
        float(group["lr"])
        for single in single_optimizers(optimizer)
        for group in getattr(single.optimizer, "param_groups", ())
    ]
    return max(rates, default=0.0)


def whole_states(
    optimizer: Any, read: Callable[[nn.Parameter, States], Tensor]
) -> dict[nn.Parameter, Tensor]:
    """``read(main parameter, its state)`` of each of this rank's parameters, whole, by parameter.

    ``main parameter`` is the optimizer's own copy, or a data parallel rank's share of it; what
    ``read`` gives has its shape. Collective: the data parallel groups of the distributed
    optimizers.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for single in single_optimizers(optimizer):
        if getattr(single, "is_stub_optimizer", False) and not hasattr(single, "gbuf_ranges"):
            continue
        found |= (_sharded if hasattr(single, "gbuf_ranges") else _plain)(single, read)
    return found


def _sharded(
    optimizer: Any, read: Callable[[nn.Parameter, States], Tensor]
) -> dict[nn.Parameter, Tensor]:
    """Each element is one rank's of the group, and zero on the others: their sum is the whole.

    Summed buffer by buffer: a sum for each parameter would take most of a small run's time.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for buffer in optimizer.buffers:
        parameters = list(buffer.param_index_map)
        sizes = [parameter.numel() for parameter in parameters]
        device = parameters[0].device
        summed = torch.zeros(sum(sizes), dtype=torch.float32, device=device)  # [elements]
        for parameter, whole in zip(parameters, summed.split(sizes), strict=True):
            place = optimizer.model_param_group_index_map.get(parameter)
            if place is not None:
                group, order = place
                main = optimizer.optimizer.param_groups[group]["params"][order]
                range_ = optimizer._get_model_param_range_map(parameter)["param"]
                whole[range_.start : range_.end] = read(main, optimizer.optimizer.state[main])
            found[parameter] = whole.view(parameter.shape)
        dist.all_reduce(summed, group=buffer.data_parallel_group)
    return found


def _plain(
    optimizer: Any, read: Callable[[nn.Parameter, States], Tensor]
) -> dict[nn.Parameter, Tensor]:
    return {
        main: read(main, optimizer.optimizer.state[main]).detach()
        for group in optimizer.optimizer.param_groups
        for main in group["params"]
    }
