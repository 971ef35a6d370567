"""The media of a microbatch, a *unit* for each encoder: named, measured, then loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from loongplug.data.bad_samples import BadSample, BadSampleError, OddVideos, bad_as
from loongplug.data.conversation import Medium
from loongplug.data.dataset import Sample
from loongplug.data.kinds import kind_of
from loongplug.data.media import MediaLoader
from loongplug.data.microbatch import MediaInput
from loongplug.data.positions import Grid
from loongplug.data.processor import Processor
from loongplug.data.video import VideoProcessor


@dataclass(frozen=True, kw_only=True)
class MediaBatch:
    """The media of one microbatch for an encoder, in the order of their tokens, not loaded.

    Every rank of a replica knows it from the text part, and so what it will cost to encode.
    """

    index: int  # of the microbatch among those that a source of this replica gives, from 0
    encoder: str
    media: tuple[Medium, ...]
    grids: tuple[Grid, ...]  # of each medium
    samples: tuple[int, ...]  # of each medium: which of the microbatch's samples has it
    where: tuple[str, ...]  # of each medium: path:line
    sounds: bool = False  # whether the encoder takes these, also where there are none

    @classmethod
    def of(
        cls,
        index: int,
        samples: Sequence[Sample],
        *,
        encoder: str,
        kinds: Sequence[str],
        only: range | None = None,
    ) -> Self:
        """The unit of these samples for an encoder that takes such media.

        ``only``: without the media of other samples than those at these places.
        """
        taken = [
            (number, sample.where, medium, grid)
            for number, sample in enumerate(samples)
            for medium, grid in zip(sample.media, sample.grids, strict=True)
            if kind_of(medium).name in kinds and (only is None or number in only)
        ]
        return cls(
            index=index,
            encoder=encoder,
            media=tuple(medium for _, _, medium, _ in taken),
            grids=tuple(grid for _, _, _, grid in taken),
            samples=tuple(number for number, _, _, _ in taken),
            where=tuple(where for _, where, _, _ in taken),
            sounds="audio" in kinds,
        )

    def part(self, numbers: Sequence[int] | None) -> Self:
        """These of the media alone, by their numbers; None for all."""
        if numbers is None:
            return self
        return replace(
            self,
            media=tuple(self.media[number] for number in numbers),
            grids=tuple(self.grids[number] for number in numbers),
            samples=tuple(self.samples[number] for number in numbers),
            where=tuple(self.where[number] for number in numbers),
        )

    @property
    def rows(self) -> int:
        """Of the encoder's input."""
        return sum(map(prod, self.grids))

    @property
    def loaded_rows(self) -> int:
        """Of what is loaded: of bytes, where it is :attr:`coded`."""
        pairs = zip(self.media, self.grids, strict=True)
        return sum(kind_of(medium).loaded_rows(medium, grid) for medium, grid in pairs)

    @property
    def coded(self) -> bool:
        """Whether its rows come as bytes."""
        return bool(self.media) and kind_of(self.media[0]).coded

    def input(self, rows: Tensor) -> MediaInput:
        """What the encoder is given, of its ``rows``."""
        grids = torch.tensor(self.grids, dtype=torch.int64).reshape(-1, 3)
        return MediaInput(rows=rows, grids=grids)


@dataclass(frozen=True, kw_only=True)
class LoadedUnit:
    """The rows of a unit or of a share of it.

    Those of media that cannot be decoded are zero, which is black for bytes. ``rows`` of images
    and videos are bytes (:class:`~loongplug.data.media.CodedMedia`), those of sounds
    [rows, values of a row] float32.
    """

    index: int
    encoder: str
    rows: Tensor
    bad: dict[int, BadSample]  # by the number of the sample within the microbatch
    decoded: int  # media that were read for it, and not found in a cache
    odd: OddVideos = field(default_factory=list)  # among these

    def pin_memory(self) -> "LoadedUnit":
        """The same with rows in page-locked memory (torch's data loader asks for it)."""
        return replace(self, rows=self.rows.pin_memory())


class UnitLoader:
    """Reads and decodes units, in whatever process it is called in, with a cache there."""

    def __init__(
        self, processor: Processor, *, videos: VideoProcessor, cache_bytes: int = 256 * 2**20
    ) -> None:
        self._media = MediaLoader(processor, videos=videos, cache_bytes=cache_bytes)
        self._videos = videos
        self._byte_width = 0
        if processor.images is not None:
            self._byte_width = processor.images.pixel_bytes.width(processor.images.patch_dim)

    def __call__(self, unit: MediaBatch) -> LoadedUnit:
        """Never raises for media that cannot be decoded, or not to the grids of the text."""
        before = self._media.decoded
        bad: dict[int, BadSample] = {}
        try:
            rows = self._load(unit, range(len(unit.media)))  # in one call: see MediaLoader
        except BadSampleError:  # of one of them
            parts = []
            for number in range(len(unit.grids)):
                try:
                    parts.append(self._load(unit, (number,)))
                except BadSampleError as error:
                    bad.setdefault(unit.samples[number], error.sample)
                    parts.append(self._zero(unit.part((number,))))
            rows = torch.cat(parts)
        odd, self._videos.odd = self._videos.odd, []
        return LoadedUnit(
            index=unit.index,
            encoder=unit.encoder,
            rows=rows,
            bad=bad,
            decoded=self._media.decoded - before,
            odd=odd,
        )

    def _zero(self, unit: MediaBatch) -> Tensor:
        """Rows as the unit's, but of nothing."""
        if unit.coded:
            return torch.zeros(unit.loaded_rows, self._byte_width, dtype=torch.uint8)
        nothing = self._media.no_rows(sounds=True)
        return nothing.new_zeros(unit.loaded_rows, nothing.shape[1])

    def _load(self, unit: MediaBatch, numbers: Sequence[int]) -> Tensor:
        """Rows of these media of the unit."""
        where = ", ".join(dict.fromkeys(unit.where[number] for number in numbers))
        expected = [list(unit.grids[number]) for number in numbers]
        if not expected:
            return self._media.no_rows(sounds=unit.sounds)
        with bad_as("pixels"):
            media = [unit.media[number] for number in numbers]
            rows, found = self._media.rows(media, where=where)
            grids = [list(grid) for grid in found]
            if grids != expected:
                raise ValueError(
                    f"{where}: the media have grids {grids}, but the text was written for"
                    f" {expected}: do not change media files while they are in use."
                )
        return rows
