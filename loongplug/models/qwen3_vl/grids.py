"""Per-patch geometry of Qwen3-VL's packed images: position taps, rotary angles.

Everything here follows from the patch grids alone; tables are made on the host.
"""

import torch
from torch import Tensor

from loongplug.models.patch_grids import FrameGeometry, FrameTables, patch_coordinates


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
    upper, lower = top * side, bottom * side
    taps = torch.stack([upper + left, upper + right, lower + left, lower + right], dim=1)
    up, back = 1 - down, 1 - along
    weights = torch.stack([up * back, up * along, down * back, down * along], dim=1)
    return taps, weights


class PackedGeometry(FrameGeometry):
    """Geometry of one model's units; ``side`` is the position table's.

    A frame takes about 200 bytes per patch.
    """

    def packed(self, grid_thw: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """Of all frames of a unit with the patch grids ``grid_thw`` [images, 3], at least one.

        Returns the two of :func:`frame_position_taps`, and the angles of
        :func:`~loongplug.models.patch_grids.frame_rotary_angles`, packed along the patches, on
        ``device``.
        """
        tables = [each.tables for each in self.frames(grid_thw, device)]
        return tuple(torch.cat(parts) for parts in zip(*tables, strict=True))

    def _of_frame(self, height: int, width: int) -> FrameTables:
        taps = frame_position_taps(height, width, side=self._side, merge=self._merge)
        return FrameTables(tables=(*taps, self._angles(height, width)))
