"""What is planned of a step before it is made: samples, units of media, who encodes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count, islice, repeat
from math import prod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from loongplug.data.media_kinds import KINDS
from loongplug.data.microbatch import MediaToCome, Share
from loongplug.data.sample import BadSample, Grid, MediumExtent, OddVideos, RowExtent, Sample
from loongplug.data.sample_order import ResumePoint, SampleOrder
from loongplug.data.workers import Pool

_CHUNK = 16  # samples that are measured at a time


class UnitMedium(NamedTuple):
    """One of a unit's media, by its row."""

    sample: int  # which of the microbatch's has it
    row: int  # of the dataset
    number: int  # in the row
    extent: MediumExtent


@dataclass(frozen=True, kw_only=True)
class MediaBatch:
    """The media of one microbatch for an encoder, in the order of their tokens, not loaded."""

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
        """The unit of these rows for an encoder of such media; ``only``: of the samples there."""
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
        """The batch with the media of these numbers alone; None for all."""
        if numbers is None:
            return self
        return replace(self, media=tuple(self.media[number] for number in numbers))

    @property
    def grids(self) -> tuple[Grid, ...]:
        return tuple(each.extent.grid for each in self.media)

    @property
    def samples(self) -> tuple[int, ...]:
        return tuple(each.sample for each in self.media)

    @property
    def extents(self) -> tuple[MediumExtent, ...]:
        return tuple(each.extent for each in self.media)

    @property
    def rows(self) -> int:
        return sum(map(prod, self.grids))

    @property
    def loaded_rows(self) -> int:
        """The rows of what is loaded: of bytes, where the media are :attr:`coded`."""
        return sum(KINDS[each.kind].loaded_rows(each) for each in self.extents)

    @property
    def coded(self) -> bool:
        return bool(self.media) and KINDS[self.media[0].extent.kind].coded

    def to_come(
        self, load: Callable[[range], Tensor], decode: Callable[[range, Tensor], Tensor]
    ) -> MediaToCome:
        grids = torch.tensor(self.grids, dtype=torch.int64).reshape(-1, 3)
        return MediaToCome(grids=grids, numbers=range(len(self.grids)), load=load, decode=decode)


@dataclass(frozen=True, kw_only=True)
class PlannedShare:
    """What one of the encoder's replicas encodes of a unit, before the media are there."""

    share: Share
    media: MediaBatch  # of the share alone
    load: Callable[[], LoadedUnit] | None  # to be called once; None: it is not loaded here


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """A microbatch's media for one encoder, before they are there; who encodes what of them."""

    media: MediaBatch
    shares: tuple[PlannedShare, ...]
    replica: int = 0  # the decoder's, of which the microbatch is


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The replica of the encoder that encodes each microbatch's media; the same on all ranks.

    Replicas take turns, from a step's first microbatch on. ``by_cost`` is given grids of media and
    the number of ``replicas``, and may let several share those that are left at a step's end or,
    for ``whole_steps``, all. ``by_plan`` goes before, for a whole step; None: as without it.
    """

    replicas: int = 1
    by_cost: Callable[..., Sequence[tuple[Share, ...]]] | None = None
    whole_steps: bool = False
    by_plan: Any = None  # None: no step is planned

    def together(self, step: int) -> range:
        """The microbatches of a step of so many that are assigned together."""
        return range(step) if self.by_plan is not None else self._compared(step)

    def of(
        self, numbers: range, media: Sequence[Sequence[Grid]], *, step: int
    ) -> Sequence[tuple[Share, ...]]:
        """The shares of these microbatches of a step of so many, whose media have such grids."""
        if self.by_plan is not None and (planned := self.by_plan.shares(media)) is not None:
            return planned
        together = self._compared(step)
        in_turn: list[tuple[Share, ...]] = [
            (Share(encoder_replica=number % self.replicas),)
            for number in numbers
            if number not in together
        ]
        of_last = media[len(in_turn) :]
        if self.by_cost is None or not of_last:
            return in_turn
        assert len(of_last) == len(together), "costs are compared"
        return [*in_turn, *self.by_cost(of_last, replicas=self.replicas)]

    def of_step(self, media: Sequence[Sequence[Grid]]) -> Sequence[tuple[Share, ...]]:
        return self.of(range(len(media)), media, step=len(media))

    def _compared(self, step: int) -> range:
        """The microbatches of a step of so many whose costs are compared."""
        if self.by_cost is None:
            return range(step, step)
        return range(0 if self.whole_steps else step - step % self.replicas, step)


ONE_REPLICA = Assignment()


@dataclass(frozen=True, kw_only=True)
class EncoderUnits:
    """How units are made for one encoder: of which media, and for whom they are loaded."""

    kinds: tuple[str, ...]
    assignment: Assignment = ONE_REPLICA
    loads: Collection[int] = (0,)


def planned_units(
    numbers: range,
    media: Mapping[str, Sequence[MediaBatch]],
    *,
    step: int,
    replicas: Sequence[int],
    encoders: Mapping[str, EncoderUnits],
    load: Callable[[MediaBatch], Callable[[], LoadedUnit]],
) -> list[dict[str, PlannedUnit]]:
    """The units of each of these microbatches of a step of so many, by encoder."""
    found: list[dict[str, PlannedUnit]] = [{} for _ in numbers]
    for name, encoder in encoders.items():
        grids = [each.grids for each in media[name]]
        assigned = encoder.assignment.of(numbers, grids, step=step)
        of_each = zip(found, media[name], assigned, replicas, strict=True)
        for units, each, shares, replica in of_each:
            parts = [(share, each.part(share.media)) for share in shares]
            units[name] = PlannedUnit(
                media=each,
                shares=tuple(
                    PlannedShare(
                        share=share,
                        media=part,
                        load=load(part) if share.encoder_replica in encoder.loads else None,
                    )
                    for share, part in parts
                ),
                replica=replica,
            )
    return found


@dataclass(frozen=True, kw_only=True)
class LoadedUnit:
    """The rows of a unit or of a share of it; zero where media cannot be decoded."""

    rows: Tensor
    bad: dict[int, BadSample]  # by the number of the sample within the microbatch
    decoded: int  # media that were read for it, and not found in a cache
    odd: OddVideos = field(default_factory=list)  # among these

    def pin_memory(self) -> LoadedUnit:
        """The unit with rows in page-locked memory; a pool asks for it."""
        return replace(self, rows=self.rows.pin_memory())


@dataclass(frozen=True, kw_only=True)
class PlannedMicrobatch:
    """What is known of a microbatch before its text and its media are there."""

    number: int  # in its replica's step
    extents: tuple[RowExtent, ...]  # of all its samples
    units: Mapping[str, PlannedUnit]  # by the encoder's name
    text: Callable[[], tuple[Sample, ...]]
    replica: int = 0  # by its data parallel rank
    taken: range | None = None  # which of its samples; None: all
    begins: ResumePoint | None = None  # where a source of packs goes on that begins with it

    @property
    def trained(self) -> int:
        """Tokens of all its samples that count, if their media can be used."""
        return sum(each.trained for each in self.extents)

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """The samples that are taken, to be asked for in the microbatches' order; it waits."""
        found = self.text()
        return found if self.taken is None else found[self.taken.start : self.taken.stop]


class MicrobatchText(NamedTuple):
    """A microbatch's text: which rows, and the samples where they were made to know extents."""

    replica: int
    taken: range | None  # of its samples; None: all
    number: int  # of all of the replica's
    rows: tuple[int, ...]  # of the dataset; -1: a blank one
    extents: tuple[RowExtent, ...]
    begins: ResumePoint | None
    samples: tuple[Sample, ...] | None


class StepDraft(NamedTuple):
    """Parts of a step's microbatches that are assigned together; plans are being made."""

    numbers: range  # of the parts, of so many in the step
    step: int
    texts: Sequence[MicrobatchText]
    media: Mapping[str, Sequence[MediaBatch]]
    plans: Mapping[str, tuple[Any, Future[Any]]]


class MeasuredSamples:
    """The samples of a stream of positions, which are read ahead until they are in packs."""

    def __init__(self, pool: Pool[Any, Any], order: SampleOrder, place: ResumePoint) -> None:
        positions = chain((each for each, _ in place.state.held), count(place.state.read))
        chunks = (order.indices(islice(positions, _CHUNK)) for _ in repeat(None))
        self.chunks = pool.ordered(map(tuple, chunks))
        self._samples = chain.from_iterable(self.chunks)
        self._held: dict[int, Sample] = {}
        self.own: deque[list[Sample]] = deque()  # of packs that were taken

    def length(self, position: int) -> int:
        """The length that :class:`~loongplug.data.sample_order.PackStream` asks for."""
        sample = self._held[position] = next(self._samples)
        return len(sample)

    def taken(self, pack: Sequence[int], own: bool) -> None:
        samples = [self._held.pop(position) for position in pack]
        if own:
            self.own.append(samples)
