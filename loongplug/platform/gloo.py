"""Collectives over tensors of different sizes, which gloo lacks and NCCL has.

The tokens that experts get differ from rank to rank. Both functions are one exchange of pieces;
every rank knows all sizes, so all take the same way.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.all_gather`` for a list of tensors that differ in size."""

    @functools.wraps(original)
    def all_gather(
        tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or _alike(tensor_list):
            return original(tensor_list, tensor, group, async_op)
        sizes = [each.numel() for each in tensor_list]
        received = tensor.new_empty(sum(sizes))
        dist.all_to_all_single(
            received,
            tensor.flatten().repeat(len(sizes)),
            output_split_sizes=sizes,
            input_split_sizes=[tensor.numel()] * len(sizes),
            group=group,
        )
        for target, piece in zip(tensor_list, received.split(sizes), strict=True):
            target.copy_(piece.view_as(target))
        return None

    return all_gather


def uneven_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.reduce_scatter`` for a list of tensors that differ in size."""

    @functools.wraps(original)
    def reduce_scatter(
        output: Tensor,
        input_list: Sequence[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or op != dist.ReduceOp.SUM or _alike(input_list):
            return original(output, input_list, op, group, async_op)
        count = len(input_list)
        received = output.new_empty(count, output.numel())
        dist.all_to_all_single(
            received.view(-1),
            torch.cat([each.flatten() for each in input_list]),
            output_split_sizes=[output.numel()] * count,
            input_split_sizes=[each.numel() for each in input_list],
            group=group,
        )
        output.copy_(received.sum(0).view_as(output))
        return None

    return reduce_scatter


def _alike(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1
