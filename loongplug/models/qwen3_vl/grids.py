"""Per-patch geometry of packed images: merge-block order, position taps, rotary angles.

Everything here is a pure function of the patch grids and runs on the host. The patches of one
frame are ordered by merge block: all ``merge x merge`` patches that become one token stand
together, blocks row by row, as the image processor emits them.
"""

from functools import lru_cache

import torch
from torch import Tensor

_CACHED_GRIDS = 1024  # distinct (height, width) pairs kept; a data set has few of them


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


@lru_cache(maxsize=_CACHED_GRIDS)
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


@lru_cache(maxsize=_CACHED_GRIDS)
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
    frames = [
        frame_position_taps(height, width, side=side, merge=merge)
        for time, height, width in grid_thw.tolist()
        for _ in range(time)
    ]
    if not frames:
        return torch.empty(0, 4, dtype=torch.int64), torch.empty(0, 4)
    return torch.cat([taps for taps, _ in frames]), torch.cat([weights for _, weights in frames])


def packed_rotary_angles(grid_thw: Tensor, *, head_dim: int, base: float, merge: int) -> Tensor:
    """:func:`frame_rotary_angles` of every frame of every image, packed along the patches."""
    frames = [
        frame_rotary_angles(height, width, head_dim=head_dim, base=base, merge=merge)
        for time, height, width in grid_thw.tolist()
        for _ in range(time)
    ]
    return torch.cat(frames) if frames else torch.empty(0, head_dim // 2)


def frame_lengths(grid_thw: Tensor) -> list[int]:
    """Patches of each frame: attention never crosses a frame."""
    return [height * width for time, height, width in grid_thw.tolist() for _ in range(time)]
