"""What follows from the patch grids of packed images alone, on the host.

The patches of one frame are ordered by merge block: all ``merge x merge`` patches that become one
token stand together, blocks row by row, as the image processor emits them.
"""

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


class FrameGeometry:
    """What a family's encoder has to know of frames, with that of the sizes used last kept.

    A data set repeats few sizes. ``side`` is a length of the family's own; at most ``cache_bytes``
    are kept.
    """

    def __init__(
        self, *, side: int, head_dim: int, base: float, merge: int, cache_bytes: int = 64 * 2**20
    ) -> None:
        self._side, self._merge = side, merge
        self._head_dim, self._base = head_dim, base
        self._kept: ByteBoundedCache[tuple[int, int], tuple[Tensor, ...]] = ByteBoundedCache(
            cache_bytes
        )

    def _of_frame(self, height: int, width: int) -> tuple[Tensor, ...]:
        """Of a frame of ``height x width`` patches; the family's."""
        raise NotImplementedError

    def _angles(self, height: int, width: int) -> Tensor:
        return frame_rotary_angles(
            height, width, head_dim=self._head_dim, base=self._base, merge=self._merge
        )

    def frames(self, grid_thw: Tensor) -> list[tuple[Tensor, ...]]:
        """One for every frame of every image, in their order."""
        return [self._frame(*size) for size in frame_sizes(grid_thw)]

    def _frame(self, height: int, width: int) -> tuple[Tensor, ...]:
        frame = self._kept.get((height, width))
        if frame is None:
            frame = self._of_frame(height, width)
            self._kept.put((height, width), frame, size=sum(each.nbytes for each in frame))
        return frame
