"""Collectives on the CPU as one exchange: each rank sends every other rank what it needs.

gloo lacks tensors of different sizes, which NCCL has, and it goes around a ring: each of its
steps waits for a thread of another process, and a small tensor costs nothing else. In one
exchange nobody waits twice. The pieces are added up in the order of the ranks, on every rank
alike. Every rank knows all sizes, so all take the same way.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from loongplug.platform.loopback import OWN_ADDRESS
from loongplug.platform.replacements import as_wrapper

# Bytes that a rank sends to all others. Above, the ring's fewer bytes are worth its steps.
_SMALL = 256 * 1024

_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda pieces: pieces.sum(0, dtype=pieces.dtype),
    dist.ReduceOp.MAX: lambda pieces: pieces.amax(0),
    dist.ReduceOp.MIN: lambda pieces: pieces.amin(0),
}


class GlooOnOneDevice:
    """Stands for torch's class of gloo groups: all groups talk through the default group's device.

    torch makes a device for each group, with a thread that wakes up a hundred times a second, and
    a run has some fifty groups on each rank: a third of the processor's time where ranks share one.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **options: Any
    ) -> Any:
        """A group, as the class itself makes it."""
        first = self._of_default_group()
        address = os.environ.get(OWN_ADDRESS)
        if first is None and address is None:
            return self._original(store, rank, size, timeout=timeout, **options)
        shared = self._original._Options()
        if first is None:
            shared._devices = [self._original.create_device(hostname=address)]
        else:
            shared._devices, shared._threads = first.options._devices, first.options._threads
        shared._timeout = timeout
        for name, value in options.items():
            setattr(shared, name, value)
        return self._original(store, rank, size, shared)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def _of_default_group(self) -> Any:
        """The default group's own; None before it is there, and where it is another backend's."""
        if not dist.is_initialized() or dist.get_backend() != "gloo":
            return None
        return distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


@as_wrapper
def exchanged_all_gather(
    original: Any,
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``torch.distributed.all_gather``, also for a list of tensors that differ in size."""
    sizes = [each.numel() for each in tensor_list]
    uneven = len(set(sizes)) > 1
    if not _ours(group, async_op) or not (uneven or _small(tensor, group)):
        return original(tensor_list, tensor, group, async_op)
    pieces = _to_all(tensor, group, sizes=sizes).split(sizes)
    for target, piece in zip(tensor_list, pieces, strict=True):
        target.copy_(piece.view_as(target))
    return None


@as_wrapper
def exchanged_gather_into_tensor(
    original: Any,
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``torch.distributed.all_gather_into_tensor`` in one exchange."""
    if not _ours(group, async_op) or not _small(input_tensor, group):
        return original(output_tensor, input_tensor, group, async_op)
    output_tensor.copy_(_to_all(input_tensor, group).view_as(output_tensor))
    return None


@as_wrapper
def exchanged_reduce_scatter(
    original: Any,
    output: Tensor,
    input: Tensor | Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``torch.distributed.reduce_scatter``, also for tensors that differ in size, or ``_tensor``.

    The latter is given one tensor with the ranks' pieces one behind the other.
    """
    if not _ours(group, async_op) or op not in _REDUCTIONS:
        return original(output, input, op, group, async_op)
    ranks, own = dist.get_world_size(group), output.numel()
    if isinstance(input, Tensor):
        sent, sizes = input.flatten(), [own] * ranks
    else:
        sent, sizes = torch.cat([x.flatten() for x in input]), [x.numel() for x in input]
    received = output.new_empty(ranks, own)
    _exchange(received.view(-1), sent, [own] * ranks, sizes, group=group)
    output.copy_(_REDUCTIONS[op](received).view_as(output))
    return None


@as_wrapper
def exchanged_all_reduce(
    original: Any,
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``torch.distributed.all_reduce`` in one exchange, or in none where a rank is alone."""
    ranks = dist.get_world_size(group)
    if ranks == 1 and not async_op and op in _REDUCTIONS:
        return None  # gloo would have a thread of its own look at it
    if not _ours(group, async_op) or op not in _REDUCTIONS or not _small(tensor, group):
        return original(tensor, op, group, async_op)
    pieces = _to_all(tensor, group).view(ranks, tensor.numel())
    tensor.copy_(_REDUCTIONS[op](pieces).view_as(tensor))
    return None


def _ours(group: Any, async_op: bool) -> bool:
    """Whether the caller waits, on a group that others are in too and that gathers no calls."""
    if async_op or dist.get_world_size(group) < 2:
        return False
    waiting = distributed_c10d._world.pg_coalesce_state
    return not waiting or (group or dist.group.WORLD) not in waiting


def _small(tensor: Tensor, group: Any) -> bool:
    return tensor.nbytes * dist.get_world_size(group) <= _SMALL


def _to_all(tensor: Tensor, group: Any, *, sizes: Sequence[int] | None = None) -> Tensor:
    """What all ranks gave, of these ``sizes`` or each as many elements as ``tensor``: flat."""
    ranks, own = dist.get_world_size(group), tensor.numel()
    sizes = sizes or [own] * ranks
    received = tensor.new_empty(sum(sizes))
    _exchange(received, tensor.flatten().repeat(ranks), sizes, [own] * ranks, group=group)
    return received


def _exchange(
    received: Tensor, sent: Tensor, sizes: Sequence[int], sent_sizes: Sequence[int], *, group: Any
) -> None:
    """all_to_all_single of the group itself: one collective for who looks on, the caller's."""
    group = group or dist.group.WORLD
    group.alltoall_base(received, sent, sizes, sent_sizes).wait()
