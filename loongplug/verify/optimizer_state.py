"""What a rank's optimizer and gradient buffers hold, in whole parameters.

A distributed optimizer leaves a data parallel rank with its own share of each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Read = Callable[[nn.Parameter, dict[str, Tensor]], Tensor]


def gather_gradient_shards(chunks: Sequence[nn.Module]) -> None:
    """Make every ``main_grad`` whole on every rank. Collective: all data parallel groups.

    What is overwritten are the shares of other ranks, which nobody reads before the next step.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    for name in ("bucket_groups", "expert_parallel_bucket_groups"):
        for group in (group for module in modules for group in getattr(module, name, ())):
            if not group.ddp_config.use_distributed_optimizer:
                continue
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                whole = bucket.grad_data
                share = whole.chunk(ranks.size())[ranks.rank()]
                dist.all_gather_into_tensor(whole, share.clone(), group=ranks)


def single_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, however deep."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        return [optimizer]
    return [single for each in chained for single in single_optimizers(each)]


def whole_states(optimizer: Any, read: Read) -> dict[nn.Parameter, Tensor]:
    """``read(main parameter, its state)`` of each of this rank's parameters, whole, by parameter.

    ``main parameter`` is the optimizer's own copy, or a data parallel rank's share of it; what
    ``read`` gives has its shape. Collective: all data parallel groups.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for single in single_optimizers(optimizer):
        if hasattr(single, "gbuf_ranges"):
            found |= _sharded(single, read)
        elif not getattr(single, "is_stub_optimizer", False):
            for main in (
                each for group in single.optimizer.param_groups for each in group["params"]
            ):
                found[main] = read(main, single.optimizer.state[main]).detach()
    return found


def _sharded(optimizer: Any, read: Read) -> dict[nn.Parameter, Tensor]:
    """Each element is one rank's of the group, and zero on the others: their sum is the whole."""
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
