"""Images as bytes until they are where they are encoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loongplug.platform.transfers import to_device

_VALUES = 256  # of a byte


@dataclass(frozen=True, eq=False)
class PixelBytes:
    """Rows of patches as bytes, and what an image processor makes of each.

    A row of bytes has a patch's pixels once, by channel, row and column; a row of values has them
    in each of the ``frames`` of a temporal patch. ``values``, [channels, 256] float32, has of each
    byte what the processor makes of it, by rescaling and normalising: so both kinds of rows are bit
    by bit the same pixels.
    """

    values: Tensor
    frames: int

    @classmethod
    def of(cls, transform: Any, *, frames: int) -> "PixelBytes":
        """By an image processor of transformers, the Pillow one, of images with three channels."""
        each = np.broadcast_to(np.arange(_VALUES, dtype=np.uint8)[:, None], (3, _VALUES, 1))
        if transform.do_rescale:
            each = transform.rescale(each, transform.rescale_factor)
        if transform.do_normalize:
            each = transform.normalize(each, transform.image_mean, transform.image_std)
        values = np.ascontiguousarray(each[:, :, 0], dtype=np.float32)
        return cls(values=torch.from_numpy(values), frames=frames)

    def width(self, row_values: int) -> int:
        """Bytes of a row that has so many values."""
        return row_values // self.frames

    def decoded(self, rows: Tensor) -> Tensor:
        """Rows of values float32 of rows of bytes, on their device, without a wait of the host.

        [rows, channels * pixels] uint8 to [rows, channels * frames * pixels].
        """
        channels = len(self.values)
        pixels = rows.shape[1] // channels
        first = torch.arange(channels, dtype=torch.int32, device=rows.device) * _VALUES
        places = rows.view(-1, channels, pixels).int() + first[:, None]
        values = to_device(self.values, rows.device).view(-1)
        found = values.index_select(0, places.view(-1)).view(-1, channels, 1, pixels)
        return found.expand(-1, -1, self.frames, -1).flatten(1)


def cut(frames: Tensor, *, patch: int, merge: int) -> Tensor:
    """Rows [patches, channels * patch * patch] of frames [frames, channels, height, width].

    Of whole merge blocks, ordered as :class:`~loongplug.data.image_patches.ImagePatches` says.
    """
    count, channels, height, width = frames.shape
    rows, columns = height // patch, width // patch
    sizes: Sequence[int] = (rows // merge, merge, patch, columns // merge, merge, patch)
    pieces = frames[:, :, : rows * patch, : columns * patch].reshape(count, channels, *sizes)
    # [frames, block rows, block columns, merge, merge, channels, patch, patch]
    return pieces.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * patch * patch)
