"""A unit's images and videos as bytes: how many rows they have, and what values they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from loongplug.data.conversation import Medium
from loongplug.data.kinds import KINDS, kind_of
from loongplug.data.positions import Grid

if TYPE_CHECKING:
    from torch import Tensor

    from loongplug.data.pixel_bytes import PixelBytes


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

    def decoded(self, rows: Tensor, media: Sequence[Medium], grids: Sequence[Grid]) -> Tensor:
        """Rows of values float32 of rows of bytes, on their device, without a wait of the host.

        [byte rows, channels * pixels] uint8 to [patches, channels * frames * pixels].
        """
        import torch

        found: list[Tensor] = []
        for kind, group in groupby(
            zip(media, grids, strict=True), key=lambda each: kind_of(each[0])
        ):
            together = list(group)
            counts = [kind.loaded_rows(*each) for each in together]
            part, rows = rows.split([sum(counts), len(rows) - sum(counts)])
            if kind is KINDS["image"]:  # those that follow each other, at once
                found.append(self._images.decoded(part))
                continue
            for (_, grid), frames in zip(together, part.split(counts), strict=True):
                found.append(self._videos().of_video(frames, grid))
        assert not len(rows), "each is of a medium"
        return found[0] if len(found) == 1 else torch.cat(found)
