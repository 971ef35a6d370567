"""Per-patch geometry of Qwen3-VL's packed images: position taps, rotary angles.

Everything here follows from the patch grids alone and runs on the host.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from loongplug.models.patch_grids import (
    KeptFrames,
    frame_rotary_angles,
    frame_sizes,
    patch_coordinates,
)


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


def packed_position_taps(grid_thw: Tensor, *, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """:func:`frame_position_taps` of every frame of every image, packed along the patches."""
    return _pack_taps(
        frame_position_taps(height, width, side=side, merge=merge)
        for height, width in frame_sizes(grid_thw)
    )


def packed_rotary_angles(grid_thw: Tensor, *, head_dim: int, base: float, merge: int) -> Tensor:
    """:func:`frame_rotary_angles` of every frame of every image, packed along the patches."""
    frames = (
        frame_rotary_angles(height, width, head_dim=head_dim, base=base, merge=merge)
        for height, width in frame_sizes(grid_thw)
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

    At most ``cache_bytes`` are kept; a frame takes about 200 bytes per patch.
    """

    def __init__(
        self, *, side: int, head_dim: int, base: float, merge: int, cache_bytes: int = 64 * 2**20
    ) -> None:
        self._side, self._merge = side, merge
        self._head_dim, self._base = head_dim, base
        self._frames = KeptFrames(self._frame, cache_bytes=cache_bytes)

    def position_taps(self, grid_thw: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`packed_position_taps`."""
        return _pack_taps((frame.taps, frame.weights) for frame in self._frames.of(grid_thw))

    def rotary_angles(self, grid_thw: Tensor) -> Tensor:
        """As :func:`packed_rotary_angles`."""
        frames = self._frames.of(grid_thw)
        return torch.cat([torch.empty(0, self._head_dim // 2), *(f.angles for f in frames)])

    def _frame(self, height: int, width: int) -> _Frame:
        taps, weights = frame_position_taps(height, width, side=self._side, merge=self._merge)
        angles = frame_rotary_angles(
            height, width, head_dim=self._head_dim, base=self._base, merge=self._merge
        )
        return _Frame(taps, weights, angles)


def _pack_taps(frames: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    taps, weights = [torch.empty(0, 4, dtype=torch.int64)], [torch.empty(0, 4)]
    for frame_taps, frame_weights in frames:
        taps.append(frame_taps)
        weights.append(frame_weights)
    return torch.cat(taps), torch.cat(weights)
