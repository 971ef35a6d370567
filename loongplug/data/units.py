"""The media of a microbatch, a *unit* for each encoder: named, measured, then loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from loongplug.data.bad_samples import BadSample, BadSampleError, OddVideos, bad_as
from loongplug.data.dataset import ChatDataset
from loongplug.data.extents import MediumExtent, RowExtent
from loongplug.data.kinds import KINDS
from loongplug.data.media import MediaLoader
from loongplug.data.microbatch import MediaToCome
from loongplug.data.positions import Grid
from loongplug.data.survey import MAKE_AGAIN


class UnitMedium(NamedTuple):
    """One of a unit's media, by its row."""

    sample: int  # which of the microbatch's has it
    row: int  # of the dataset
    number: int  # in the row
    extent: MediumExtent


@dataclass(frozen=True, kw_only=True)
class MediaBatch:
    """The media of one microbatch for an encoder, in the order of their tokens, not loaded.

    Every rank of a replica knows it from extents, and so what it will cost to encode.
    """

    index: int  # of the microbatch among those that a source of this replica gives, from 0
    encoder: str
    media: tuple[UnitMedium, ...]

    @classmethod
    def of(
        cls,
        index: int,
        rows: Sequence[int],
        extents: Sequence[RowExtent],
        *,
        encoder: str,
        kinds: Sequence[str],
        only: range | None = None,
    ) -> Self:
        """The unit of samples of these rows for an encoder that takes such media.

        ``only``: without the media of other samples than those at these places.
        """
        return cls(
            index=index,
            encoder=encoder,
            media=tuple(
                UnitMedium(sample, row, number, extent.media[number])
                for sample, (row, extent) in enumerate(zip(rows, extents, strict=True))
                for number in extent.numbers
                if extent.media[number].kind in kinds and (only is None or sample in only)
            ),
        )

    def part(self, numbers: Sequence[int] | None) -> Self:
        """These of the media alone, by their numbers; None for all."""
        if numbers is None:
            return self
        return replace(self, media=tuple(self.media[number] for number in numbers))

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Of each medium."""
        return tuple(each.extent.grid for each in self.media)

    @property
    def samples(self) -> tuple[int, ...]:
        """Of each medium: which of the microbatch's samples has it."""
        return tuple(each.sample for each in self.media)

    @property
    def extents(self) -> tuple[MediumExtent, ...]:
        """Of each medium."""
        return tuple(each.extent for each in self.media)

    @property
    def rows(self) -> int:
        """Of the encoder's input."""
        return sum(map(prod, self.grids))

    @property
    def loaded_rows(self) -> int:
        """Of what is loaded: of bytes, where it is :attr:`coded`."""
        return sum(KINDS[each.kind].loaded_rows(each) for each in self.extents)

    @property
    def coded(self) -> bool:
        """Whether its rows come as bytes."""
        return bool(self.media) and KINDS[self.media[0].extent.kind].coded

    def to_come(self, rows: Callable[[range], Tensor]) -> MediaToCome:
        """What the encoder is given, by what makes the ``rows`` of these of the media."""
        grids = torch.tensor(self.grids, dtype=torch.int64).reshape(-1, 3)
        return MediaToCome(grids=grids, numbers=range(len(self.grids)), rows=rows)


@dataclass(frozen=True, kw_only=True)
class LoadedUnit:
    """The rows of a unit or of a share of it.

    Those of media that cannot be decoded are zero, which is black for bytes. ``rows`` of images
    and videos are bytes (:class:`~loongplug.data.media.CodedMedia`), those of sounds
    [rows, values of a row] float32.
    """

    rows: Tensor
    bad: dict[int, BadSample]  # by the number of the sample within the microbatch
    decoded: int  # media that were read for it, and not found in a cache
    odd: OddVideos = field(default_factory=list)  # among these

    def pin_memory(self) -> "LoadedUnit":
        """The same with rows in page-locked memory; a pool asks for it."""
        return replace(self, rows=self.rows.pin_memory())


class UnitLoader:
    """Reads and decodes units, in whatever process it is called in, with a cache there."""

    def __init__(self, dataset: ChatDataset, *, cache_bytes: int = 256 * 2**20) -> None:
        processor = dataset.processor
        self._dataset = dataset
        self._media = MediaLoader(processor, videos=dataset.videos, cache_bytes=cache_bytes)
        self._byte_width = 0
        if processor.images is not None:
            self._byte_width = processor.images.pixel_bytes.width(processor.images.patch_dim)

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
        """Of the rows that are loaded for it."""
        return self._zero(unit, device="meta").nbytes

    def _zero(self, unit: MediaBatch, *, device: str = "cpu") -> Tensor:
        """Rows as the unit's, but of nothing."""
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
                indexed = self._dataset.extents is not None
                raise ValueError(
                    f"{where}: the media have grids {grids}, but the text was written for"
                    f" {expected}: do not change media files while they are in use."
                    + f" {MAKE_AGAIN}"
                    * indexed
                )
        return loaded
