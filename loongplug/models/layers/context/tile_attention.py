"""Attention over tiles: their results merged by logsumexp, their gradients added up."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loongplug.context.tiles import TileGroups
from loongplug.models.layers.context.kernels import attend, attend_backward


class Merged:
    """Attention's output for queries, over the keys of all tiles that came in so far.

    ``out`` [b, heads, s, dim] and ``lse`` [b, heads, s] are at least float32.
    """

    def __init__(self, q: Tensor, *, scale: float | None) -> None:
        """For queries [b, heads, s, dim]; a ``scale`` of None is 1 / sqrt(dim)."""
        dtype = exact(q.dtype)
        self.out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)
        self._q, self._scale = q, scale

    def add(self, k: Tensor, v: Tensor, groups: TileGroups) -> None:
        """Attend to ``k`` and ``v`` [b, groups, s_k, dim] over tiles."""
        for tiles in groups:
            rows, columns = [tile.queries for tile in tiles], [tile.keys for tile in tiles]
            out, lse = attend(
                _batched(self._q, rows),
                _batched(k, columns),
                _batched(v, columns),
                causal=tiles[0].causal,
                scale=self._scale,
            )
            pieces = zip(rows, out.chunk(len(tiles)), lse.chunk(len(tiles)), strict=True)
            for each, its_out, its_lse in pieces:
                self._merge(each, its_out, its_lse)

    def _merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        before = self.lse[:, :, rows]
        both = torch.logaddexp(before, lse)
        merged = self.out[:, :, rows]
        merged.mul_((before - both).exp_().unsqueeze(-1))
        merged.addcmul_(out.to(merged.dtype), (lse - both).exp_().unsqueeze(-1))
        before.copy_(both)


class Gradients:
    """The backward of :class:`Merged`: ``q`` is the queries' gradient over all tiles so far.

    It has the shape of the queries, and is at least float32.
    """

    def __init__(
        self, grad: Tensor, *, q: Tensor, out: Tensor, lse: Tensor, scale: float | None
    ) -> None:
        """For the gradient of ``out``; ``out`` and ``lse`` are those over all keys."""
        self.q = torch.zeros(q.shape, dtype=exact(q.dtype), device=q.device)
        self._grad, self._queries, self._out, self._lse = grad, q, out, lse
        self._scale = scale

    def add(self, k: Tensor, v: Tensor, groups: TileGroups) -> tuple[Tensor, Tensor]:
        """These queries' parts of the gradients of ``k`` and ``v``, at least float32."""
        dk, dv = (torch.zeros(x.shape, dtype=self.q.dtype, device=x.device) for x in (k, v))
        for tiles in groups:
            rows, columns = [tile.queries for tile in tiles], [tile.keys for tile in tiles]
            parts = attend_backward(
                _batched(self._grad, rows),
                _batched(self._queries, rows),
                _batched(k, columns),
                _batched(v, columns),
                _batched(self._out, rows),
                _batched(self._lse, rows),
                causal=tiles[0].causal,
                scale=self._scale,
            )
            pieces = (part.chunk(len(tiles)) for part in parts)
            for tile, its_q, its_k, its_v in zip(tiles, *pieces, strict=True):
                self.q[:, :, tile.queries] += its_q
                dk[:, :, tile.keys] += its_k
                dv[:, :, tile.keys] += its_v
        return dk, dv


def exact(dtype: torch.dtype) -> torch.dtype:
    """In what sums over tiles are kept, for tensors of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def _batched(x: Tensor, slices: Sequence[slice]) -> Tensor:
    """Slices of one length of ``x`` [b, heads, s, ...] as a batch [slices * b, heads, length]."""
    if len(slices) == 1:
        return x[:, :, slices[0]]
    return torch.cat([x[:, :, each] for each in slices])
