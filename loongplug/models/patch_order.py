"""Media of a unit in an order in which frames of one length stand next to each other.

Attention goes through frames of one length in one call. Where they lie apart it has to stack them
in each layer; in this order they are slices. What an encoder hands on is in the media's own order.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PatchOrder:
    """``grids`` [media, 3] int64 in the new order; ``order[i]`` is the patch that comes to place i.

    ``order`` and its ``inverse`` are [patches] int64 on the host, None where nothing moves.
    """

    grids: Tensor
    order: Tensor | None = None
    inverse: Tensor | None = None

    def put(self, patches: Tensor) -> Tensor:
        """``patches`` [patches, ...] of the media's own order in this one."""
        return _permuted(patches, self.order, self.inverse)

    def put_back(self, patches: Tensor) -> Tensor:
        """What undoes :meth:`put`."""
        return _permuted(patches, self.inverse, self.order)


def by_frame_length(grid_thw: Tensor) -> PatchOrder:
    """Of media [media, 3] on the host: by their frames' length, equal ones as they were.

    Nothing moves where frames of one length stand next to each other already.
    """
    frames = grid_thw[:, 1] * grid_thw[:, 2]
    if len(frames.unique_consecutive()) == len(frames.unique()):
        return PatchOrder(grids=grid_thw)
    media = frames.argsort(stable=True)
    patches = frames * grid_thw[:, 0]
    moved = patches[media]
    ends, new_ends = patches.cumsum(0)[media], moved.cumsum(0)
    order = (ends - new_ends).repeat_interleave(moved) + torch.arange(int(moved.sum()))
    return PatchOrder(grids=grid_thw[media], order=order, inverse=order.argsort())


def _permuted(patches: Tensor, order: Tensor | None, inverse: Tensor | None) -> Tensor:
    if order is None or inverse is None:
        return patches
    permuted: Tensor = _Permuted.apply(patches, order, inverse)
    return permuted


class _Permuted(torch.autograd.Function):
    """Rows in another order; torch would add the gradient's rows to zeros, here they are taken."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None
