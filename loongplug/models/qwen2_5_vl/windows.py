"""Which patches share a window, and the order that makes windows contiguous; on the host.

Windows tile each frame from its top left corner, row by row. Those at the right and the lower edge
hold what is left of it. Merge blocks stay whole, and frames stay contiguous.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from loongplug.models.patch_grids import KeptFrames, frame_lengths, frame_rotary_angles


def frame_windows(
    height: int, width: int, *, merge: int, side: int
) -> tuple[Tensor, tuple[int, ...]]:
    """The windows of one frame of ``height x width`` patches.

    Args:
        side: a window's side in merged tokens.

    Returns:
        the frame's tokens in the order of their windows, [tokens] int64, and the patches of each
        window.
    """
    rows, columns = height // merge, width // merge
    windows_per_row = -(-columns // side)
    token = torch.arange(rows * columns)
    window = token // columns // side * windows_per_row + token % columns // side
    order = torch.argsort(window, stable=True)  # within a window, row by row
    return order, tuple((torch.bincount(window) * merge**2).tolist())


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


@dataclass(frozen=True)
class _Frame:
    order: Tensor  # [tokens] int64
    angles: Tensor  # [patches, head_dim / 2] float32
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.order.nbytes + self.angles.nbytes + 8 * len(self.lengths)


class WindowGeometry:
    """Plans the windows of one model's units, with the frame sizes used last kept.

    At most ``cache_bytes`` are kept; a frame takes about 160 bytes per patch.
    """

    def __init__(
        self, *, side: int, head_dim: int, base: float, merge: int, cache_bytes: int = 64 * 2**20
    ) -> None:
        self._side, self._merge = side, merge
        self._head_dim, self._base = head_dim, base
        self._frames = KeptFrames(self._frame, cache_bytes=cache_bytes)

    def plan(self, grid_thw: Tensor) -> WindowPlan:
        """The windows of a unit with the patch grids ``grid_thw`` [images, 3], at least one."""
        order, start = [], 0
        frames = self._frames.of(grid_thw)
        for frame in frames:
            order.append(frame.order + start)
            start += frame.order.shape[0]
        return WindowPlan(
            order=torch.cat(order),
            angles=torch.cat([frame.angles for frame in frames]),
            window_lengths=tuple(length for frame in frames for length in frame.lengths),
            frame_lengths=tuple(frame_lengths(grid_thw)),
        )

    def _frame(self, height: int, width: int) -> _Frame:
        order, lengths = frame_windows(height, width, merge=self._merge, side=self._side)
        angles = frame_rotary_angles(
            height, width, head_dim=self._head_dim, base=self._base, merge=self._merge
        )
        return _Frame(order, permute_blocks(angles, order), lengths)
