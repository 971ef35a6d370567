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

    def __init__(self, q: Tensor) -> None:
        dtype = exact(q.dtype)
        self.out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)

    def add(
        self, q: Tensor, k: Tensor, v: Tensor, groups: TileGroups, *, scale: float | None
    ) -> None:
        """Attend over tiles: ``q`` [b, heads, s, dim] to k, v [b, groups, s_k, dim]."""
        for tiles in groups:
            rows, columns = [tile.queries for tile in tiles], [tile.keys for tile in tiles]
            out, lse = attend(
                _batched(q, rows),
                _batched(k, columns),
                _batched(v, columns),
                causal=tiles[0].causal,
                scale=scale,
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
    """The gradients of queries, and of keys and values, over all tiles that came in so far.

    ``q`` has the shape of the queries, ``k`` and ``v`` those of the keys; at least float32.
    """

    def __init__(self, q: Tensor, k: Tensor) -> None:
        dtype = exact(q.dtype)
        self.q = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.k = torch.zeros(k.shape, dtype=dtype, device=q.device)
        self.v = torch.zeros(k.shape, dtype=dtype, device=q.device)

    def add(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        groups: TileGroups,
        *,
        scale: float | None,
    ) -> None:
        """Add what the tiles give; ``out`` and ``lse`` are those of the queries' whole rows."""
        for tiles in groups:
            rows, columns = [tile.queries for tile in tiles], [tile.keys for tile in tiles]
            parts = attend_backward(
                _batched(grad, rows),
                _batched(q, rows),
                _batched(k, columns),
                _batched(v, columns),
                _batched(out, rows),
                _batched(lse, rows),
                causal=tiles[0].causal,
                scale=scale,
            )
            pieces = (part.chunk(len(tiles)) for part in parts)
            for tile, dq, dk, dv in zip(tiles, *pieces, strict=True):
                self.q[:, :, tile.queries] += dq
                self.k[:, :, tile.keys] += dk
                self.v[:, :, tile.keys] += dv


def exact(dtype: torch.dtype) -> torch.dtype:
    """In what sums over tiles are kept, for tensors of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def _batched(x: Tensor, slices: Sequence[slice]) -> Tensor:
    """Slices of one length of ``x`` [b, heads, s, ...] as a batch [slices * b, heads, length]."""
    if len(slices) == 1:
        return x[:, :, slices[0]]
    return torch.cat([x[:, :, each] for each in slices])
