"""Per-patch geometry of packed images: merge-block order, position taps, rotary angles.

Everything here follows from the patch grids alone and runs on the host. The patches of one
frame are ordered by merge block: all ``merge x merge`` patches that become one token stand
together, blocks row by row, as the image processor emits them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from loongplug.data.cache import ByteBoundedCache


def patch_coordinates(height: int, width: int, *, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of every patch of one frame, [height * width] int64 each, in block order."""
    grid = torch.arange(height * width).view(
        height // merge, merge, width // merge, merge
    )  # [block row, row in block, block column, column in block]
    flat = grid.permute(0, 2, 1, 3).reshape(-1)
    return flat // width, flat % width


def _axis_taps(size: int, *, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where ``size`` points spread over ``side`` table entries fall: lower, upper, upper's share.

    Both ends meet the table's ends (align_corners), as Qwen3-VL resamples its position table.
    """
    points = torch.linspace(0, side - 1, size, dtype=torch.float64)
    lower = points.floor().to(torch.int64)
    return lower, (lower + 1).clamp(max=side - 1), (points - lower).float()


def frame_position_taps(height: int, width: int, *, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Bilinear taps of one frame into a ``side x side`` position table.

    Returns table rows [patches, 4] int64 and their weights [patches, 4] float32.
    """
    row, column = patch_coordinates(height, width, merge=merge)
    top, bottom, down = (axis[row] for axis in _axis_taps(height, side=side))
    left, right, along = (axis[column] for axis in _axis_taps(width, side=side))
    taps = torch.stack(
        [
            top * side + left,
            top * side + right,
            bottom * side + left,
            bottom * side + right,
        ],
        dim=1,
    )
    weights = torch.stack(
        [
            (1 - down) * (1 - along),
            (1 - down) * along,
            down * (1 - along),
            down * along,
        ],
        dim=1,
    )
    return taps, weights


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


def packed_position_taps(grid_thw: Tensor, *, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """:func:`frame_position_taps` of every frame of every image, packed along the patches."""
    return _pack_taps(
        frame_position_taps(height, width, side=side, merge=merge)
        for height, width in _frame_sizes(grid_thw)
    )


def packed_rotary_angles(grid_thw: Tensor, *, head_dim: int, base: float, merge: int) -> Tensor:
    """:func:`frame_rotary_angles` of every frame of every image, packed along the patches."""
    frames = (
        frame_rotary_angles(height, width, head_dim=head_dim, base=base, merge=merge)
        for height, width in _frame_sizes(grid_thw)
    )
    return torch.cat([torch.empty(0, head_dim // 2), *frames])


@dataclass(frozen=True)
class _Frame:
    taps: Tensor  # [patches, 4] int64
    weights: Tensor  # [patches, 4] float32
    angles: Tensor  # [patches, head_dim / 2] float32

    @property
    def nbytes(self) -> int:
        return self.taps.nbytes + self.weights.nbytes + self.angles.nbytes


class PackedGeometry:
    """The packed functions for one model, with the frame sizes used last kept.

    A data set repeats few sizes. At most ``cache_bytes`` are kept; a frame takes about 200 bytes
    per patch.
    """

    def __init__(
        self, *, side: int, head_dim: int, base: float, merge: int, cache_bytes: int = 64 * 2**20
    ) -> None:
        self._side, self._merge = side, merge
        self._head_dim, self._base = head_dim, base
        self._frames: ByteBoundedCache[tuple[int, int], _Frame] = ByteBoundedCache(cache_bytes)

    def position_taps(self, grid_thw: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`packed_position_taps`."""
        frames = [self._frame(height, width) for height, width in _frame_sizes(grid_thw)]
        return _pack_taps((frame.taps, frame.weights) for frame in frames)

    def rotary_angles(self, grid_thw: Tensor) -> Tensor:
        """As :func:`packed_rotary_angles`."""
        frames = [self._frame(height, width) for height, width in _frame_sizes(grid_thw)]
        return torch.cat([torch.empty(0, self._head_dim // 2), *(f.angles for f in frames)])

    def _frame(self, height: int, width: int) -> _Frame:
        frame = self._frames.get((height, width))
        if frame is None:
            taps, weights = frame_position_taps(height, width, side=self._side, merge=self._merge)
            angles = frame_rotary_angles(
                height, width, head_dim=self._head_dim, base=self._base, merge=self._merge
            )
            frame = _Frame(taps, weights, angles)
            self._frames.put((height, width), frame, size=frame.nbytes)
        return frame


def _pack_taps(frames: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    taps, weights = [torch.empty(0, 4, dtype=torch.int64)], [torch.empty(0, 4)]
    for frame_taps, frame_weights in frames:
        taps.append(frame_taps)
        weights.append(frame_weights)
    return torch.cat(taps), torch.cat(weights)


def frame_lengths(grid_thw: Tensor) -> list[int]:
    """Patches of each frame: attention never crosses a frame."""
    return [height * width for height, width in _frame_sizes(grid_thw)]


def _frame_sizes(grid_thw: Tensor) -> list[tuple[int, int]]:
    return [(height, width) for time, height, width in grid_thw.tolist() for _ in range(time)]
