"""Sizes, places and angles that follow from the patch grids of packed images alone.

The patches of one frame are ordered by merge block: all ``merge x merge`` patches that become one
token stand together, blocks row by row, as the image processor emits them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loongplug.data.workers import ByteBoundedCache
from loongplug.platform.devices import to_device


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


@dataclass(frozen=True, kw_only=True)
class FrameTables:
    """Tables of one frame for an encoder: ``tables`` for the device, and for the host the
    patches of each of its ``windows``, where the family has any.
    """

    tables: tuple[Tensor, ...]
    windows: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of the tables."""
        return sum(each.nbytes for each in self.tables)


class FrameGeometry:
    """Tables of frames, made on the host; those of the sizes used last stay on the device.

    A data set repeats few sizes, so that most microbatches have nothing to copy. ``side`` is a
    length of the family's own; at most ``cache_bytes`` are kept, on the encoder's device.
    """

    def __init__(
        self, *, side: int, head_dim: int, base: float, merge: int, cache_bytes: int = 64 * 2**20
    ) -> None:
        self._side, self._merge = side, merge
        self._head_dim, self._base = head_dim, base
        self._kept: ByteBoundedCache[tuple[torch.device, int, int], FrameTables] = ByteBoundedCache(
            cache_bytes
        )

    def _of_frame(self, height: int, width: int) -> FrameTables:
        """Tables of a frame of ``height x width`` patches, on the host; the family's."""
        raise NotImplementedError

    def _angles(self, height: int, width: int) -> Tensor:
        return frame_rotary_angles(
            height, width, head_dim=self._head_dim, base=self._base, merge=self._merge
        )

    def frames(self, grid_thw: Tensor, device: torch.device) -> list[FrameTables]:
        """Tables of every frame of every image, in their order, with its tables on ``device``.

        They are not to be changed: other units get the same ones.
        """
        return [self._frame(*size, device) for size in frame_sizes(grid_thw)]

    def _frame(self, height: int, width: int, device: torch.device) -> FrameTables:
        key = device, height, width
        frame = self._kept.get(key)
        if frame is None:
            # An evaluation may meet a size first, and training may not save its kind of tensors.
            with torch.inference_mode(False):
                made = self._of_frame(height, width)
                tables = tuple(to_device(each, device) for each in made.tables)
            frame = replace(made, tables=tables)
            self._kept.put(key, frame, size=frame.nbytes)
        return frame
