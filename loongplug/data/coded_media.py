"""A unit's images and videos as bytes: how many rows they have, and what values they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from loongplug.data.extents import MediumExtent

if TYPE_CHECKING:
    from torch import Tensor

    from loongplug.data.pixel_bytes import PixelBytes


def is_coded(media: Sequence[MediumExtent]) -> bool:
    """Whether the rows of these media of one encoder are bytes: not of sounds, nor of none."""
    return bool(media) and not any(medium.kind == "audio" for medium in media)


def byte_rows(medium: MediumExtent) -> int:
    """Rows of bytes of an image or a video.

    An image has one for each patch of its one frame, or of each of its tiles. A video has one for
    each patch of each of its frames, none twice.
    """
    frames, height, width = medium.grid
    return (frames if medium.kind == "image" else int(medium.detail[0])) * height * width


class CodedMedia:
    """Rows of bytes of whole units, to rows of values as the encoder takes them.

    ``videos`` is asked where there is one, since it loads the folder's video processor.
    """

    def __init__(self, images: PixelBytes, *, videos: Callable[[], PixelBytes]) -> None:
        self._images = images
        self._videos = videos

    def width(self, row_values: int) -> int:
        """Bytes of a row, where a row of values has so many: of images and videos alike."""
        return self._images.width(row_values)

    def decoded(self, rows: Tensor, media: Sequence[MediumExtent]) -> Tensor:
        """Rows of values float32 of rows of bytes, on their device, without a wait of the host.

        [byte rows, channels * pixels] uint8 to [patches, channels * frames * pixels].
        """
        import torch

        counts = list(map(byte_rows, media))
        assert sum(counts) == len(rows), (counts, rows.shape)
        found, start = [], 0
        numbers = range(len(media))
        # An image may be of one frame or of tiles.
        kinds = groupby(numbers, key=lambda number: media[number].kind == "image")
        for images, group in kinds:
            together = list(group)
            end = start + sum(counts[number] for number in together)
            part, start = rows[start:end], end
            if images:  # that follow each other, at once
                found.append(self._images.decoded(part))
                continue
            videos = part.split([counts[number] for number in together])
            for number, frames in zip(together, videos, strict=True):
                found.append(self._videos().of_video(frames, media[number].grid))
        return found[0] if len(found) == 1 else torch.cat(found)
