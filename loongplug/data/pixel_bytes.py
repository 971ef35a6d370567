"""Images and frames as bytes until they are where they are encoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loongplug.data.positions import Grid
from loongplug.platform.devices import to_device

_VALUES = 256  # of a byte


@dataclass(frozen=True, eq=False)
class PixelBytes:
    """Rows of patches as bytes, and what an image or a video processor makes of each.

    A row of bytes has a patch's pixels of one frame, by channel, row and column; a row of values
    has those of all ``frames`` of a temporal patch, in which an image is repeated. ``values``,
    [channels, 256] float32, has what the processor makes of each byte: its own pixels, bit by bit.
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
        values = torch.from_numpy(np.ascontiguousarray(each[:, :, 0], dtype=np.float32))
        return cls(values=values, frames=frames)

    @classmethod
    def of_videos(cls, transform: Any, *, frames: int) -> "PixelBytes":
        """By a video processor of transformers, of frames with three channels."""
        every = torch.arange(_VALUES, dtype=torch.uint8).repeat(1, 3, 1, 1)  # a frame of one row
        made: Tensor = transform.rescale_and_normalize(
            every,
            transform.do_rescale,
            transform.rescale_factor,
            transform.do_normalize,
            transform.image_mean,
            transform.image_std,
        )
        return cls(values=made.float().view(3, _VALUES), frames=frames)

    def width(self, row_values: int) -> int:
        """Bytes of a row that has so many values."""
        return row_values // self.frames

    def decoded(self, rows: Tensor) -> Tensor:
        """Rows of values float32 of an image's rows, on their device, without a wait of the host.

        [rows, channels * pixels] uint8 to [rows, channels * frames * pixels].
        """
        return self._values(rows)[:, :, None].expand(-1, -1, self.frames, -1).flatten(1)

    def of_video(self, rows: Tensor, grid: Grid) -> Tensor:
        """As :meth:`decoded`, of a video's rows, frame by frame; the last may fill up its patch.

        [frames * height * width, channels * pixels] uint8 to
        [time * height * width, channels * frames of a patch * pixels].
        """
        time, height, width = grid
        each = self._values(rows).view(-1, height * width, len(self.values), rows.shape[1] // 3)
        if missing := time * self.frames - len(each):
            each = torch.cat([each, each[-1:].expand(missing, -1, -1, -1)])
        # [time, frames of a patch, height * width, channels, pixels]
        patches = each.view(time, self.frames, *each.shape[1:])
        return patches.permute(0, 2, 3, 1, 4).reshape(time * height * width, -1)

    def frame_rows(self, patches: Tensor, grid: Grid, *, frames: int) -> Tensor:
        """The rows of bytes of a video's first ``frames``, of ``patches`` as a processor cuts them.

        [time * height * width, channels * frames of a patch * pixels] uint8 to
        [frames * height * width, channels * pixels].
        """
        time, height, width = grid
        each = patches.view(time, height * width, len(self.values), self.frames, -1)
        rows = each.permute(0, 3, 1, 2, 4).reshape(time * self.frames * height * width, -1)
        return rows[: frames * height * width].clone()  # a view would keep what is repeated

    def _values(self, rows: Tensor) -> Tensor:
        """[rows, channels * pixels] uint8 to [rows, channels, pixels] float32."""
        channels = len(self.values)
        first = torch.arange(channels, dtype=torch.int32, device=rows.device) * _VALUES
        places = rows.view(len(rows), channels, rows.shape[1] // channels).int()
        values = to_device(self.values, rows.device).view(-1)
        return values.index_select(0, places.add_(first[:, None]).view(-1)).view(places.shape)


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


def cut_once(
    image: NDArray[np.uint8], *, patch_size: int, merge_size: int, temporal_patch_size: int
) -> tuple[NDArray[np.uint8], int, int]:
    """Qwen's rows of an image [channels, height, width], with its frame once, and their grid."""
    rows = cut(torch.from_numpy(image)[None], patch=patch_size, merge=merge_size)
    return rows.numpy(), image.shape[1] // patch_size, image.shape[2] // patch_size
