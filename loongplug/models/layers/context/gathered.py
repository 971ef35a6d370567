"""``--cp-comm-type all_gather``: a rank's queries against the whole row's keys, head by head."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from loongplug.models.layers.by_heads import by_heads
from loongplug.models.layers.context.row import ContextRow
from loongplug.models.layers.context.tile_attention import Gradients, Merged, exact


def attend_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    row: ContextRow,
    group: dist.ProcessGroup,
    scale: float | None,
) -> Tensor:
    """Attention for which keys and values are gathered, one key/value head after another.

    The next head's are on their way while one is computed, so a rank holds the row's keys and
    values of two heads. The backward gathers them again, and sends their gradients to the ranks
    that own the tokens, which add them up. All ranks of ``group`` have to call it, in one order.

    Args:
        query: [s, b, heads, dim], this rank's tokens.
        key, value: [s, b, groups, dim].
        scale: of the scores; None is 1 / sqrt(dim).

    Returns:
        [s, b, heads, dim] in query's dtype.
    """
    out: Tensor = _GatheredAttention.apply(query, key, value, row, group, scale)
    return out


class _GatheredAttention(torch.autograd.Function):
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
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=exact(q.dtype), device=q.device)
        heads = q.size(1) // key.size(2)
        for head, (k, v) in enumerate(_whole_heads(key, value, row, group)):
            mine = slice(head * heads, (head + 1) * heads)
            merged = Merged(q[:, mine], scale=scale)
            merged.add(k, v, row.tiles)
            out[:, mine], lse[:, mine] = merged.out, merged.lse
        ctx.save_for_backward(q, key, value, out, lse)
        ctx.row, ctx.group, ctx.scale = row, group, scale
        return out.permute(2, 0, 1, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, key, value, out, lse = ctx.saved_tensors
        row, group = ctx.row, ctx.group
        grad = by_heads(grad_out.contiguous().permute(1, 2, 0, 3))
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, key, value))
        heads = q.size(1) // key.size(2)
        returning: list[_Returning] = []  # of at most one head
        for head, (k, v) in enumerate(_whole_heads(key, value, row, group)):
            mine = slice(head * heads, (head + 1) * heads)
            found = Gradients(
                grad[:, mine], q=q[:, mine], out=out[:, mine], lse=lse[:, mine], scale=ctx.scale
            )
            of_keys = torch.stack(found.add(k, v, row.tiles))
            grad_q[:, mine] = found.q
            returning.append(_Returning(of_keys.to(key.dtype), head, row=row, group=group))
            if head:
                returning.pop(0).into(grad_k, grad_v)
        returning.pop().into(grad_k, grad_v)
        return grad_q.permute(2, 0, 1, 3), grad_k, grad_v, None, None, None


def _whole_heads(
    key: Tensor, value: Tensor, row: ContextRow, group: dist.ProcessGroup
) -> Iterator[tuple[Tensor, Tensor]]:
    """The row's keys and values of one key/value head after another, each [b, 1, length, dim]."""
    coming = _gather(key, value, 0, row, group)
    for head in range(key.size(2)):
        gathered, work = coming
        if head + 1 < key.size(2):
            coming = _gather(key, value, head + 1, row, group)
        work.wait()
        whole = gathered.index_select(0, row.back)  # [length, 2, b, dim]
        del gathered
        k, v = whole.unsqueeze(3).permute(1, 2, 3, 0, 4).unbind()
        yield by_heads(k), by_heads(v)


def _gather(
    key: Tensor, value: Tensor, head: int, row: ContextRow, group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """Ask for all ranks' keys and values of a head: [length, 2, b, dim], part after part."""
    own = torch.stack((key[:, :, head], value[:, :, head]), dim=1)
    gathered = own.new_empty(row.split.length, *own.shape[1:])
    return gathered, dist.all_gather_into_tensor(gathered, own, group=group, async_op=True)


class _Returning:
    """The gradients of a head's keys and values, on their way to the ranks that own the tokens."""

    def __init__(
        self, found: Tensor, head: int, *, row: ContextRow, group: dist.ProcessGroup
    ) -> None:
        """Send what this rank found of keys and values, [2, b, 1, length, dim]."""
        self._sent = found[:, :, 0].permute(2, 0, 1, 3).index_select(0, row.order)
        self._received = torch.empty_like(self._sent)
        self._work: Any = dist.all_to_all_single(
            self._received, self._sent, group=group, async_op=True
        )
        self._head, self._ranks = head, row.ranks

    def into(self, grad_k: Tensor, grad_v: Tensor) -> None:
        """Write the sum of what all ranks found into the head's place in [s, b, groups, dim]."""
        self._work.wait()
        by_rank = self._received.unflatten(0, (self._ranks, -1))  # [ranks, s, 2, b, dim]
        total = by_rank.sum(0, dtype=exact(by_rank.dtype))
        grad_k[:, :, self._head], grad_v[:, :, self._head] = total[:, 0], total[:, 1]
