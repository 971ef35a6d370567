"""Rows of media: loaded as bytes of pixels, which become values where they are encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loongplug.data.conversation import Medium
from loongplug.data.dataset import ChatDataset
from loongplug.data.media_kinds import KINDS, Context, each_of, extent_of, kind_of
from loongplug.data.microbatch import MediaInput
from loongplug.data.planned_media import LoadedUnit, MediaBatch
from loongplug.data.processor import ImagePatches, Processor
from loongplug.data.sample import MAKE_AGAIN, BadSample, BadSampleError, Grid, MediumExtent, bad_as
from loongplug.data.video import VideoProcessor
from loongplug.data.workers import ByteBoundedCache
from loongplug.platform.devices import to_device

_VALUES = 256  # of a byte


@dataclass(frozen=True, eq=False)
class PixelBytes:
    """Rows of patches as bytes, and what an image or a video processor makes of each.

    A row of bytes has a patch's pixels of one frame, by channel, row and column; a row of values
    has those of all ``frames``. ``values``, [channels, 256] float32, has what becomes of each byte.
    """

    values: Tensor
    frames: int

    @classmethod
    def of_images(cls, images: ImagePatches) -> PixelBytes:
        """By an image processor of transformers, the Pillow one, of images with three channels."""
        transform = images.transform
        each = np.broadcast_to(np.arange(_VALUES, dtype=np.uint8)[:, None], (3, _VALUES, 1))
        if transform.do_rescale:
            each = transform.rescale(each, transform.rescale_factor)
        if transform.do_normalize:
            each = transform.normalize(each, transform.image_mean, transform.image_std)
        values = torch.from_numpy(np.ascontiguousarray(each[:, :, 0], dtype=np.float32))
        return cls(values=values, frames=images.temporal_patch_size)

    @classmethod
    def of_videos(cls, transform: Any) -> PixelBytes:
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
        return cls(values=made.float().view(3, _VALUES), frames=transform.temporal_patch_size)

    def decoded(self, rows: Tensor, patches: int | None = None) -> Tensor:
        """Rows of values float32 of images, or of a video with so many ``patches`` of a frame.

        [frames * patches, channels * pixels] uint8 to [rows, channels * frames of a row * pixels].
        """
        each = self._values(rows)
        if patches is None:  # an image's frame, repeated
            return each[:, :, None].expand(-1, -1, self.frames, -1).flatten(1)
        each = each.unflatten(0, (-1, patches))
        if missing := -len(each) % self.frames:
            each = torch.cat([each, each[-1:].expand(missing, -1, -1, -1)])
        # [time, frames of a row, patches, channels, pixels]
        together = each.unflatten(0, (-1, self.frames))
        return together.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(1)

    def _values(self, rows: Tensor) -> Tensor:
        channels = len(self.values)
        first = torch.arange(channels, dtype=torch.int32, device=rows.device) * _VALUES
        places = rows.view(len(rows), channels, rows.shape[1] // channels).int()
        values = to_device(self.values, rows.device).view(-1)
        return values.index_select(0, places.add_(first[:, None]).view(-1)).view(places.shape)


class CodedMedia:
    """Rows of bytes of whole units, to rows of values as the encoder takes them."""

    def __init__(self, images: PixelBytes, *, videos: Callable[[], PixelBytes]) -> None:
        self._images = images
        self._videos = videos

    def width(self, row_values: int) -> int:
        """Bytes of a row, where a row of values has so many: of images and videos alike."""
        return row_values // self._images.frames

    def decoded(self, rows: Tensor, media: Sequence[MediumExtent]) -> Tensor:
        """Rows of values float32 of the media's rows of bytes, as of :meth:`PixelBytes.decoded`."""
        found: list[Tensor] = []
        for kind, group in groupby(media, key=lambda medium: medium.kind):
            together = list(group)
            counts = [KINDS[kind].loaded_rows(medium) for medium in together]
            part, rows = rows.split([sum(counts), len(rows) - sum(counts)])
            if kind == "image":  # those that follow each other, at once
                found.append(self._images.decoded(part))
                continue
            for medium, frames in zip(together, part.split(counts), strict=True):
                found.append(self._videos().decoded(frames, prod(medium.grid[1:])))
        assert not len(rows), "each is of a medium"
        return found[0] if len(found) == 1 else torch.cat(found)


def coded_media(processor: Processor, videos: VideoProcessor) -> CodedMedia | None:
    """What becomes of rows of bytes; None where there are neither images nor videos."""
    if processor.images is None:
        return None
    of_videos = cache(lambda: PixelBytes.of_videos(videos.transform))
    return CodedMedia(PixelBytes.of_images(processor.images), videos=of_videos)


class MediaLoader:
    """Media to one microbatch's rows for an encoder, with a bounded cache of processed ones."""

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
        rows, grids = self.rows(media, where=where)
        if kind_of(media[0]).coded:
            assert self.coded is not None, "opening refuses images and videos"
            rows = self.coded.decoded(rows, list(map(extent_of, media, grids)))
        return MediaInput(loaded=rows, grids=torch.tensor(grids))

    def rows(self, media: Sequence[Medium], *, where: str) -> tuple[Tensor, list[Grid]]:
        """Of one or more media of one encoder; rows of images and videos are bytes."""
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


class UnitLoader:
    """Reads and decodes units, in whatever process it is called in, with a cache there."""

    def __init__(self, dataset: ChatDataset, *, cache_bytes: int = 256 * 2**20) -> None:
        processor = dataset.processor
        self._dataset = dataset
        self._media = MediaLoader(processor, videos=dataset.videos, cache_bytes=cache_bytes)
        self._byte_width = 0
        if processor.images is not None:
            self._byte_width = processor.images.patch_dim // processor.images.temporal_patch_size

    def __call__(self, unit: MediaBatch) -> LoadedUnit:
        """Never raises for media that cannot be decoded, or not to their grids."""
        before = self._media.decoded
        bad: dict[int, BadSample] = {}
        try:
            rows = self._load(unit)  # in one call: see MediaLoader
        except BadSampleError:  # of one of them
            parts = []
            for number, medium in enumerate(unit.media):
                one = unit.part((number,))
                try:
                    parts.append(self._load(one))
                except BadSampleError as error:
                    bad.setdefault(medium.sample, error.sample)
                    parts.append(self._zero(one))
            rows = torch.cat(parts)
        videos = self._dataset.videos
        odd, videos.odd = videos.odd, []
        decoded = self._media.decoded - before
        return LoadedUnit(rows=rows, bad=bad, decoded=decoded, odd=odd)

    def bytes_of(self, unit: MediaBatch) -> int:
        return self._zero(unit, device="meta").nbytes

    def _zero(self, unit: MediaBatch, *, device: str = "cpu") -> Tensor:
        audio = self._dataset.processor.audio
        width, kind = self._byte_width, torch.uint8
        if not unit.coded and audio is not None:
            width, kind = audio.sizes.mel_bins, torch.float32
        return torch.zeros(unit.loaded_rows, width, dtype=kind, device=device)

    def _load(self, unit: MediaBatch) -> Tensor:
        if not unit.media:
            return self._zero(unit)
        rows = dict.fromkeys(each.row for each in unit.media)
        where = ", ".join(map(self._dataset.rows.where, rows))
        expected = [list(grid) for grid in unit.grids]
        with bad_as("pixels"):
            named = {
                row: self._dataset.media(
                    row, {each.number: each.extent for each in unit.media if each.row == row}
                )
                for row in rows
            }
            media = [named[each.row][each.number] for each in unit.media]
            loaded, found = self._media.rows(media, where=where)
            grids = [list(grid) for grid in found]
            if grids != expected:
                cure = "" if self._dataset.extents is None else f" {MAKE_AGAIN}"
                raise ValueError(
                    f"{where}: the media have grids {grids}, but the text was written for"
                    f" {expected}: do not change media files while they are in use.{cure}"
                )
        return loaded
