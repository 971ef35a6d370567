"""``--cp-comm-type p2p``: keys and values go around a ring of the ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from loongplug.models.layers.attention import by_heads
from loongplug.models.layers.context.row import ContextRow
from loongplug.models.layers.context.tile_attention import Gradients, Merged


def attend_in_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    row: ContextRow,
    group: dist.ProcessGroup,
    scale: float | None,
) -> Tensor:
    """Attention in which each rank sees one rank's keys and values after another.

    A rank holds its own, those it computes with, and those that are coming. In the backward their
    gradients travel along in at least float32, and end where the tokens lie. Each step waits for
    its slowest rank, so the split should give each pair of ranks equal work, as a zigzag does.
    Arguments and result are those of
    :func:`~loongplug.models.layers.context.gathered.attend_gathered`.
    """
    return _RingAttention.apply(query, key, value, row, group, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row: ContextRow,
        group: dist.ProcessGroup,
        scale: float | None,
    ) -> Tensor:
        q = by_heads(query.permute(1, 2, 0, 3))  # [b, heads, s, dim]
        own = torch.stack((key, value)).permute(0, 2, 3, 1, 4).contiguous()
        merged = Merged(q, scale=scale)
        held = own
        for step in range(row.ranks):
            coming = _Passing(held, group) if step + 1 < row.ranks else None
            k, v = held
            merged.add(k, v, row.tiles_by_rank[_owner(row, step)])
            if coming is not None:
                held = coming.taken()
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, own, out, merged.lse)
        ctx.row, ctx.group, ctx.scale = row, group, scale
        return out.permute(2, 0, 1, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, held, out, lse = ctx.saved_tensors
        row, group = ctx.row, ctx.group
        grad = by_heads(grad_out.contiguous().permute(1, 2, 0, 3))
        found = Gradients(grad, q=q, out=out, lse=lse, scale=ctx.scale)
        travelling: _Passing | None = None  # what ranks before this one found for held
        for step in range(row.ranks):
            coming = _Passing(held, group) if step + 1 < row.ranks else None
            k, v = held
            both = torch.stack(found.add(k, v, row.tiles_by_rank[_owner(row, step)]))
            if travelling is not None:
                both += travelling.taken()
            travelling = _Passing(both, group)
            if coming is not None:
                held = coming.taken()
        assert travelling is not None
        grad_k, grad_v = travelling.taken().to(held.dtype).permute(0, 3, 1, 2, 4)
        return found.q.to(q.dtype).permute(2, 0, 1, 3), grad_k, grad_v, None, None, None


def _owner(row: ContextRow, step: int) -> int:
    """Whose keys and values this rank holds in a step."""
    return (row.rank - step) % row.ranks


class _Passing:
    """A tensor on its way to the next rank of the ring, and the same of the one before.

    An all-to-all without anything for the others: it keeps its place among the group's other
    collectives, whatever their backend.
    """

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        self._sent, self._received = sent, torch.empty_like(sent)
        rank, ranks = group.rank(), group.size()
        given, taken = [0] * ranks, [0] * ranks
        given[(rank + 1) % ranks] = taken[rank - 1] = sent.numel()
        self._work: Any = dist.all_to_all_single(
            *(self._received.view(-1), sent.view(-1), taken, given), group=group, async_op=True
        )

    def taken(self) -> Tensor:
        """The tensor that the rank before gave."""
        self._work.wait()
        return self._received
