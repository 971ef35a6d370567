"""What follows from the patch grids of packed images alone, on the host.

The patches of one frame are ordered by merge block: all ``merge x merge`` patches that become one
token stand together, blocks row by row, as the image processor emits them.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from loongplug.data.cache import ByteBoundedCache


def frame_sizes(grid_thw: Tensor) -> list[tuple[int, int]]:
    """Height and width in patches of every frame of every image."""
    return [(height, width) for time, height, width in grid_thw.tolist() for _ in range(time)]


def frame_lengths(grid_thw: Tensor) -> list[int]:
    """Patches of each frame: attention never crosses a frame."""
    return [height * width for height, width in frame_sizes(grid_thw)]


def patch_coordinates(height: int, width: int, *, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of every patch of one frame, [height * width] int64 each, in block order."""
    grid = torch.arange(height * width).view(
        height // merge, merge, width // merge, merge
    )  # [block row, row in block, block column, column in block]
    flat = grid.permute(0, 2, 1, 3).reshape(-1)
    return flat // width, flat % width


def frame_rotary_angles(
    height: int, width: int, *, head_dim: int, base: float, merge: int
) -> Tensor:
    """Rotary angles of one frame's channel pairs, [patches, head_dim / 2] float32.

    The first half of the pairs turns with the row, the second with the column.
    """
    half = head_dim // 2
    inverse = 1.0 / base ** (torch.arange(0, half, 2, dtype=torch.float32) / half)  # [head_dim / 4]
    row, column = patch_coordinates(height, width, merge=merge)
    return torch.cat([row[:, None] * inverse, column[:, None] * inverse], dim=1)


class FrameGeometry(Protocol):
    """What a family's encoder needs to know of frames of one size."""

    @property
    def nbytes(self) -> int:
        """The memory it takes."""


class KeptFrames[F: FrameGeometry]:
    """The geometry of frames, with that of the sizes used last kept.

    A data set repeats few sizes. ``make`` gives the geometry of a height and a width in patches;
    at most ``cache_bytes`` are kept.
    """

    def __init__(self, make: Callable[[int, int], F], *, cache_bytes: int) -> None:
        self._make = make
        self._frames: ByteBoundedCache[tuple[int, int], F] = ByteBoundedCache(cache_bytes)

    def of(self, grid_thw: Tensor) -> list[F]:
        """One for every frame of every image, in their order."""
        return [self._frame(height, width) for height, width in frame_sizes(grid_thw)]

    def _frame(self, height: int, width: int) -> F:
        frame = self._frames.get((height, width))
        if frame is None:
            frame = self._make(height, width)
            self._frames.put((height, width), frame, size=frame.nbytes)
        return frame
