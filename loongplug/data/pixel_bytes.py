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

    ``formula``, [3, channels, 1] float32: what a byte is divided by, what is then taken from it,
    and what the rest is divided by, where that gives the same ``values`` to the bit. A processor of
    a CPU computes three times as fast as it looks up. None: no such numbers are known.
    """

    values: Tensor
    frames: int
    formula: Tensor | None = None

    @classmethod
    def of(cls, transform: Any, *, frames: int) -> "PixelBytes":
        """By an image processor of transformers, the Pillow one, of images with three channels."""
        each = np.broadcast_to(np.arange(_VALUES, dtype=np.uint8)[:, None], (3, _VALUES, 1))
        if transform.do_rescale:
            each = transform.rescale(each, transform.rescale_factor)
        if transform.do_normalize:
            each = transform.normalize(each, transform.image_mean, transform.image_std)
        values = torch.from_numpy(np.ascontiguousarray(each[:, :, 0], dtype=np.float32))
        return cls(values=values, frames=frames, formula=_formula(transform, values=values))

    def width(self, row_values: int) -> int:
        """Bytes of a row that has so many values."""
        return row_values // self.frames

    def decoded(self, rows: Tensor) -> Tensor:
        """Rows of values float32 of rows of bytes, on their device, without a wait of the host.

        [rows, channels * pixels] uint8 to [rows, channels * frames * pixels].
        """
        channels = len(self.values)
        split = rows.view(len(rows), channels, rows.shape[1] // channels)
        found = self._looked_up(split) if self.formula is None else _computed(split, self.formula)
        return found[:, :, None].expand(-1, -1, self.frames, -1).flatten(1)

    def _looked_up(self, split: Tensor) -> Tensor:
        first = torch.arange(len(self.values), dtype=torch.int32, device=split.device) * _VALUES
        places = split.int() + first[:, None]  # [rows, channels, pixels]
        values = to_device(self.values, split.device).view(-1)
        return values.index_select(0, places.view(-1)).view(places.shape)


def _formula(transform: Any, *, values: Tensor) -> Tensor | None:
    """See :class:`PixelBytes`."""
    channels = len(values)
    divided, taken, spread = torch.ones(channels), torch.zeros(channels), torch.ones(channels)
    if transform.do_rescale:
        divided *= 1 / transform.rescale_factor
    if transform.do_normalize:
        taken, spread = (
            torch.tensor(each, dtype=torch.float32).expand(channels)
            for each in (transform.image_mean, transform.image_std)
        )
    formula = torch.stack([divided, taken, spread])[:, :, None]
    every = torch.arange(_VALUES, dtype=torch.uint8).expand(1, channels, _VALUES)
    return formula if torch.equal(_computed(every, formula)[0], values) else None


def _computed(split: Tensor, formula: Tensor) -> Tensor:
    # By tensors, not numbers: CUDA would multiply by a number's inverse, which is not the same.
    divided, taken, spread = to_device(formula, split.device)
    return split.float().div_(divided).sub_(taken).div_(spread)


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
