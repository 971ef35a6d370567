"""Which patches share a window, and the order that makes windows contiguous.

Windows tile each frame from its top left corner, row by row. Those at the right and the lower edge
hold what is left of it. Merge blocks stay whole, and frames stay contiguous.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from loongplug.models.patch_grids import FrameGeometry, FrameTables, frame_lengths
from loongplug.platform.devices import to_device


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

    ``inverse`` undoes it. Lengths are in patches. ``angles`` are those of
    :func:`~loongplug.models.patch_grids.frame_rotary_angles`, in the windows' order,
    [patches, head_dim / 2] float32.
    """

    order: Tensor
    inverse: Tensor
    angles: Tensor
    window_lengths: tuple[int, ...]
    frame_lengths: tuple[int, ...]


class WindowGeometry(FrameGeometry):
    """Plans the windows of one model's units; ``side`` is a window's, in merged tokens.

    A frame takes about 160 bytes per patch.
    """

    def plan(self, grid_thw: Tensor, device: torch.device) -> WindowPlan:
        """The windows of a unit with the patch grids ``grid_thw`` [images, 3], at least one.

        Tensors are on ``device``.
        """
        frames = self.frames(grid_thw, device)
        orders, angles = zip(*(each.tables for each in frames), strict=True)
        # The first token of each one's frame: [all tokens].
        tokens = [each.shape[1] for each in orders]
        *starts, count = accumulate(tokens, initial=0)
        start, times = to_device(torch.tensor([starts, tokens]), device)  # [frames] each
        first = torch.repeat_interleave(start, times, output_size=count)
        order, inverse = torch.cat(orders, dim=1) + first
        return WindowPlan(
            order=order,
            inverse=inverse,
            angles=torch.cat(angles),
            window_lengths=tuple(length for each in frames for length in each.windows),
            frame_lengths=tuple(frame_lengths(grid_thw)),
        )

    def _of_frame(self, height: int, width: int) -> FrameTables:
        order, lengths = frame_windows(height, width, merge=self._merge, side=self._side)
        angles = permute_blocks(self._angles(height, width), order)
        return FrameTables(
            tables=(torch.stack([order, torch.argsort(order)]), angles),
            windows=tuple(lengths.tolist()),
        )
