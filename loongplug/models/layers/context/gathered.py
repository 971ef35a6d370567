"""``--cp-comm-type all_gather``: a rank's queries against the whole row's keys, by few heads."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from loongplug.models.layers.attention import by_heads
from loongplug.models.layers.context.row import ContextRow
from loongplug.models.layers.context.tile_attention import Gradients, Merged, exact

# Bytes of keys and values up to which heads are gathered together: less takes hardly less time.
_TOGETHER = 1 << 20


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
    values of two heads, and for a moment of three, when one's are put in order. Heads of short rows
    are taken several at once. The backward gathers them again, and sends their gradients to the
    ranks that own the tokens, which add them up. All ranks of ``group`` have to call it, in one
    order. ``query`` and the result are [s, b, heads, dim], of this rank's tokens; a ``scale`` of
    None is 1 / sqrt(dim).
    """
    return _GatheredAttention.apply(query, key, value, row, group, scale)


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
        for groups, k, v in _whole_heads(key, value, row, group):
            mine = slice(groups.start * heads, groups.stop * heads)
            merged = Merged(q[:, mine], scale=scale)
            merged.add(k, v, row.tiles)
            out[:, mine], lse[:, mine] = merged.out, merged.lse
            del k, v
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
        returning: list[_Returning] = []  # of heads that are computed at once, or of none
        for groups, k, v in _whole_heads(key, value, row, group):
            mine = slice(groups.start * heads, groups.stop * heads)
            found = Gradients(
                grad[:, mine], q=q[:, mine], out=out[:, mine], lse=lse[:, mine], scale=ctx.scale
            )
            of_keys = torch.stack(found.add(k, v, row.tiles))
            del k, v
            grad_q[:, mine] = found.q
            returning.append(_Returning(of_keys.to(key.dtype), groups, row=row, group=group))
            if groups.start:
                returning.pop(0).into(grad_k, grad_v)
        returning.pop().into(grad_k, grad_v)
        return grad_q.permute(2, 0, 1, 3), grad_k, grad_v, None, None, None


def _whole_heads(
    key: Tensor, value: Tensor, row: ContextRow, group: dist.ProcessGroup
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Key/value heads one after another, or a few at once, and the row's keys and values of them.

    These are [b, heads, length, dim] each; who takes them lets go of them before asking for more.
    """
    total, stride = key.size(2), _heads_at_once(key, row)
    heads = [slice(first, min(first + stride, total)) for first in range(0, total, stride)]
    coming = _gather(key, value, heads[0], row, group)
    for these, following in zip(heads, [*heads[1:], None], strict=True):
        gathered, work = coming
        if following is not None:
            coming = _gather(key, value, following, row, group)
        work.wait()
        whole = gathered.index_select(0, row.back)  # [length, 2, b, heads, dim]
        del gathered
        k, v = (by_heads(x) for x in whole.permute(1, 2, 3, 0, 4).unbind())
        del whole
        yield these, k, v
        del k, v  # they are gone before the next are put in order


def _heads_at_once(key: Tensor, row: ContextRow) -> int:
    """How many key/value heads of this rank's ``key`` [s, b, groups, dim] are gathered together."""
    b, groups, dim = key.shape[1:]
    of_head = 2 * row.split.length * b * dim * key.element_size()
    return min(max(_TOGETHER // of_head, 1), groups)


def _gather(
    key: Tensor, value: Tensor, heads: slice, row: ContextRow, group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """Ask for all ranks' keys and values of heads: [length, 2, b, heads, dim], part after part."""
    own = torch.stack((key[:, :, heads], value[:, :, heads]), dim=1)
    gathered = own.new_empty(row.split.length, *own.shape[1:])
    return gathered, dist.all_gather_into_tensor(gathered, own, group=group, async_op=True)


class _Returning:
    """The gradients of heads' keys and values, on their way to the ranks that own the tokens."""

    def __init__(
        self, found: Tensor, heads: slice, *, row: ContextRow, group: dist.ProcessGroup
    ) -> None:
        """Send what this rank found of keys and values, [2, b, heads, length, dim]."""
        self._sent = found.permute(3, 0, 1, 2, 4).index_select(0, row.order)
        self._received = torch.empty_like(self._sent)
        self._work: Any = dist.all_to_all_single(
            self._received, self._sent, group=group, async_op=True
        )
        self._heads, self._ranks = heads, row.ranks

    def into(self, grad_k: Tensor, grad_v: Tensor) -> None:
        """Write the sum of what all ranks found into the heads' places in [s, b, groups, dim]."""
        self._work.wait()
        by_rank = self._received.unflatten(0, (self._ranks, -1))  # [ranks, s, 2, b, heads, dim]
        total = by_rank.sum(0, dtype=exact(by_rank.dtype))
        grad_k[:, :, self._heads], grad_v[:, :, self._heads] = total[:, 0], total[:, 1]
