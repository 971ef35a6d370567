"""Which patches share a window, and the order that makes windows contiguous; on the host.

Windows tile each frame from its top left corner, row by row. Those at the right and the lower edge
hold what is left of it. Merge blocks stay whole, and frames stay contiguous.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from loongplug.models.patch_grids import FrameGeometry, frame_lengths


def frame_windows(height: int, width: int, *, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """The windows of one frame of ``height x width`` patches.

    Args:
        side: a window's side in merged tokens.

    Returns:
        the frame's tokens in the order of their windows, [tokens] int64, and the patches of each
        window, [windows] int64.
    """
    rows, columns = height // merge, width // merge
    windows_per_row = -(-columns // side)
    token = torch.arange(rows * columns)
    window = token // columns // side * windows_per_row + token % columns // side
    order = torch.argsort(window, stable=True)  # within a window, row by row
    return order, torch.bincount(window) * merge**2


def permute_blocks(patches: Tensor, order: Tensor) -> Tensor:
    """``patches`` [patches, ...] with block ``order[i]`` in place i; ``order`` is [blocks]."""
    blocks = patches.unflatten(0, (order.shape[0], -1))
    return blocks.index_select(0, order).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """The windows of one unit. ``order[i]`` is the token that comes to place i, [tokens] int64.

    ``angles`` are those of :func:`~loongplug.models.patch_grids.frame_rotary_angles`, in the
    windows' order, [patches, head_dim / 2] float32. Lengths are in patches.
    """

    order: Tensor
    angles: Tensor
    window_lengths: tuple[int, ...]
    frame_lengths: tuple[int, ...]

    @property
    def inverse(self) -> Tensor:
        """The order that undoes ``order``, [tokens] int64."""
        return torch.argsort(self.order)


class WindowGeometry(FrameGeometry):
    """Plans the windows of one model's units; ``side`` is a window's, in merged tokens.

    A frame takes about 160 bytes per patch.
    """

    def plan(self, grid_thw: Tensor) -> WindowPlan:
        """The windows of a unit with the patch grids ``grid_thw`` [images, 3], at least one."""
        orders, angles, lengths = zip(*self.frames(grid_thw), strict=True)
        starts = accumulate((each.shape[0] for each in orders), initial=0)
        return WindowPlan(
            order=torch.cat([each + start for each, start in zip(orders, starts, strict=False)]),
            angles=torch.cat(angles),
            window_lengths=tuple(torch.cat(lengths).tolist()),
            frame_lengths=tuple(frame_lengths(grid_thw)),
        )

    def _of_frame(self, height: int, width: int) -> tuple[Tensor, ...]:
        order, lengths = frame_windows(height, width, merge=self._merge, side=self._side)
        return order, permute_blocks(self._angles(height, width), order), lengths
