"""The vision part of a microbatch (a *unit*), apart from its text: named, measured, then loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from loongplug.data.bad_samples import BadSample, BadSampleError, bad_as
from loongplug.data.conversation import Medium
from loongplug.data.dataset import Sample
from loongplug.data.media import MediaLoader
from loongplug.data.positions import Grid
from loongplug.data.processor import Processor
from loongplug.data.video import VideoProcessor


@dataclass(frozen=True, kw_only=True)
class MediaBatch:
    """The images and videos of one microbatch, in the order of their tokens, not loaded.

    Every rank of a replica knows it from the text part, and so what it will cost to encode.
    """

    index: int  # of the microbatch among those that a source of this replica gives, from 0
    media: tuple[Medium, ...]
    grids: tuple[Grid, ...]  # of each medium
    samples: tuple[int, ...]  # of each medium: which of the microbatch's samples has it
    where: tuple[str, ...]  # of each medium: path:line

    @classmethod
    def of(cls, index: int, samples: Sequence[Sample]) -> Self:
        """The unit of these samples."""
        owners = [(number, sample) for number, sample in enumerate(samples) for _ in sample.media]
        return cls(
            index=index,
            media=tuple(medium for sample in samples for medium in sample.media),
            grids=tuple(grid for sample in samples for grid in sample.grids),
            samples=tuple(number for number, _ in owners),
            where=tuple(sample.where for _, sample in owners),
        )

    @property
    def patches(self) -> int:
        """Rows of pixels."""
        return sum(time * height * width for time, height, width in self.grids)

    def grid_thw(self) -> Tensor:
        """The grids as a tensor, [media, 3] int64."""
        return torch.tensor(self.grids, dtype=torch.int64).reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class LoadedUnit:
    """A unit's pixels; those of media that cannot be decoded are zero."""

    index: int
    rows: Tensor  # [rows, values of a row] float32
    bad: dict[int, BadSample]  # by the number of the sample within the microbatch
    decoded: int  # images and videos that were read for it, and not found in a cache

    def pin_memory(self) -> "LoadedUnit":
        """The same with pixels in page-locked memory (torch's data loader asks for it)."""
        return replace(self, rows=self.rows.pin_memory())


class UnitLoader:
    """Reads and decodes units, in whatever process it is called in, with a cache there."""

    def __init__(
        self, processor: Processor, *, videos: VideoProcessor, cache_bytes: int = 256 * 2**20
    ) -> None:
        self._media = MediaLoader(processor, videos=videos, cache_bytes=cache_bytes)
        self._patch_dim = processor.patch_dim

    def __call__(self, unit: MediaBatch) -> LoadedUnit:
        """Never raises for media that cannot be decoded, or not to the grids of the text."""
        before = self._media.decoded
        bad: dict[int, BadSample] = {}
        try:
            pixels = self._load(unit, range(len(unit.media)))  # in one call: see MediaLoader
        except BadSampleError:  # of one of them
            parts = []
            for number, (time, height, width) in enumerate(unit.grids):
                try:
                    parts.append(self._load(unit, (number,)))
                except BadSampleError as error:
                    bad.setdefault(unit.samples[number], error.sample)
                    parts.append(torch.zeros(time * height * width, self._patch_dim))
            pixels = torch.cat(parts)
        return LoadedUnit(
            index=unit.index, rows=pixels, bad=bad, decoded=self._media.decoded - before
        )

    def _load(self, unit: MediaBatch, numbers: Sequence[int]) -> Tensor:
        """Pixels [patches, patch_dim] of these media of the unit."""
        where = ", ".join(dict.fromkeys(unit.where[number] for number in numbers))
        grids = [list(unit.grids[number]) for number in numbers]
        with bad_as("pixels"):
            vision = self._media.load([unit.media[number] for number in numbers], where=where)
            if vision.grids.tolist() != grids:
                raise ValueError(
                    f"{where}: the images and videos have patch grids {vision.grids.tolist()},"
                    f" but the text was written for {grids}: do not change image files while they"
                    " are in use."
                )
        return vision.rows
