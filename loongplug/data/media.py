"""The rows of samples' media for the encoder: as they are loaded, and as they are encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from loongplug.data.cache import ByteBoundedCache
from loongplug.data.conversation import Medium
from loongplug.data.extents import MediumExtent
from loongplug.data.kinds import KINDS, Context, each_of, extent_of, kind_of
from loongplug.data.microbatch import MediaInput
from loongplug.data.positions import Grid
from loongplug.data.processor import Processor
from loongplug.data.video import VideoProcessor

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

    def decoded(self, rows: Tensor, media: Sequence[MediumExtent]) -> Tensor:
        """Rows of values float32 of rows of bytes, on their device, without a wait of the host.

        [byte rows, channels * pixels] uint8 to [patches, channels * frames * pixels].
        """
        import torch

        found: list[Tensor] = []
        for kind, group in groupby(media, key=lambda medium: medium.kind):
            together = list(group)
            counts = [KINDS[kind].loaded_rows(medium) for medium in together]
            part, rows = rows.split([sum(counts), len(rows) - sum(counts)])
            if kind == "image":  # those that follow each other, at once
                found.append(self._images.decoded(part))
                continue
            for medium, frames in zip(together, part.split(counts), strict=True):
                found.append(self._videos().of_video(frames, medium.grid))
        assert not len(rows), "each is of a medium"
        return found[0] if len(found) == 1 else torch.cat(found)


def coded_media(processor: Processor, videos: VideoProcessor) -> CodedMedia | None:
    """What becomes of rows of bytes; None where there are neither images nor videos."""
    if processor.images is None:
        return None
    return CodedMedia(processor.images.pixel_bytes, videos=lambda: videos.pixel_bytes)


class MediaLoader:
    """Media to one microbatch's rows for an encoder, with a bounded cache of processed ones.

    All media of a kind that are not in the cache are processed together. A file that changes is
    processed again. ``coded`` says what becomes of images and videos, which are bytes.
    """

    def __init__(
        self, processor: Processor, *, videos: VideoProcessor, cache_bytes: int = 256 * 2**20
    ) -> None:
        self._processor = processor
        self._videos = videos
        self.coded = coded_media(processor, videos)
        self._cache: ByteBoundedCache[Any, tuple[Tensor, Grid]] = ByteBoundedCache(cache_bytes)
        self.decoded = 0  # media so far; those found in the cache do not count

    def load(self, media: Sequence[Medium], *, where: str) -> MediaInput:
        """As :meth:`rows`, but rows are values."""
        import torch

        rows, grids = self.rows(media, where=where)
        if kind_of(media[0]).coded:
            assert self.coded is not None, "opening refuses images and videos"
            rows = self.coded.decoded(rows, list(map(extent_of, media, grids)))
        return MediaInput(rows=rows, grids=torch.tensor(grids))

    def rows(self, media: Sequence[Medium], *, where: str) -> tuple[Tensor, list[Grid]]:
        """Of one or more media of one encoder: rows of images and videos are bytes.

        Those are as :class:`CodedMedia` takes them; frames of sounds are [frames, mel_bins]
        float32. Raises ValueError, with ``where``, for a file that is missing, damaged or not of
        its kind.
        """
        import torch

        assert len({kind_of(medium).coded for medium in media}) == 1, "one encoder's"
        versions = each_of(lambda medium: kind_of(medium).version(medium, where=where), media)
        loaded = {version: found for version in versions if (found := self._cache.get(version))}
        missing = {
            version: medium
            for version, medium in zip(versions, media, strict=True)
            if version not in loaded
        }
        self.decoded += len(missing)
        context = Context(self._processor, self._videos, where)
        for kind in KINDS.values():
            chosen = {each: medium for each, medium in missing.items() if kind_of(medium) is kind}
            made = kind.rows(list(chosen.values()), context) if chosen else ()
            for version, each in zip(chosen, made, strict=True):
                loaded[version] = each
                self._cache.put(version, each, size=each[0].nbytes)
        rows, grids = zip(*(loaded[version] for version in versions), strict=True)
        return torch.cat(rows), list(grids)
