"""The data of a step: the text of its microbatches, who encodes what, and media to come."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loongplug.data.bad_samples import BadSamples
from loongplug.data.dataset import ChatDataset, Sample
from loongplug.data.evaluation import Evaluation, evaluated_texts
from loongplug.data.microbatch import Share
from loongplug.data.planned_packs import OwnPacks
from loongplug.data.positions import Grid
from loongplug.data.step_sizes import StepSizes
from loongplug.data.text_stream import PackedTexts, ResumePoint, padded_texts
from loongplug.data.units import LoadedUnit, MediaBatch, UnitLoader
from loongplug.data.workers import IN_PROCESS, Background, WorkerSettings

_MEDIA_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class PlannedShare:
    """What one of the encoder's replicas encodes of a unit, before the media are there.

    But for ``load``, it is the same on every rank of a model replica. ``load`` is the future of
    the rows on the rank that loads them, None on others: it waits until they are loaded. Call it
    once, in any order.
    """

    share: Share
    media: MediaBatch  # of the share alone
    load: Callable[[], LoadedUnit] | None


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """A microbatch's media for one encoder, before they are there; who encodes what of them."""

    media: MediaBatch
    shares: tuple[PlannedShare, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedMicrobatch:
    """What is known of a microbatch before its media are there."""

    number: int  # in its step
    samples: tuple[Sample, ...]
    units: Mapping[str, PlannedUnit]  # by the encoder's name
    begins: ResumePoint | None  # where a source of packs goes on that begins with it


# Says of a step who encodes what of each microbatch's media, which are given by their grids.
SharesByPlan = Callable[[Sequence[Sequence[Grid]]], Sequence[tuple[Share, ...]] | None]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which replica of the encoder encodes which microbatch's media. Pure; the same on all ranks.

    Each replica in turn, from a step's first microbatch on. ``by_cost`` assigns by what media cost:
    it is given their grids and the number of ``replicas``, and may let several replicas share a
    microbatch's media. It does so with those that are left at a step's end, fewer than there are
    replicas, or, for ``whole_steps``, with all microbatches of a step. These are asked for
    together.

    ``by_plan`` goes before that, for a whole step; it says None where that is as without it.
    """

    replicas: int = 1
    by_cost: Callable[..., Sequence[tuple[Share, ...]]] | None = None
    whole_steps: bool = False
    by_plan: SharesByPlan | None = None

    def together(self, step: int) -> range:
        """Which ones of a step of so many microbatches are assigned together."""
        return range(step) if self.by_plan is not None else self._compared(step)

    def of(
        self, numbers: range, media: Sequence[Sequence[Grid]], *, step: int
    ) -> Sequence[tuple[Share, ...]]:
        """The shares of these microbatches of a step of so many, whose media have such grids."""
        if self.by_plan is not None and (planned := self.by_plan(media)) is not None:
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
        """The same of all microbatches of a step."""
        return self.of(range(len(media)), media, step=len(media))

    def _compared(self, step: int) -> range:
        """Those whose costs are compared."""
        if self.by_cost is None:
            return range(step, step)
        return range(0 if self.whole_steps else step - step % self.replicas, step)


ONE_REPLICA = Assignment()


@dataclass(frozen=True, kw_only=True)
class EncoderUnits:
    """How units are made for one encoder: of which kinds of media, and for which replicas.

    Media are loaded for those replicas that ``loads`` names. With ``samples``, units are made of
    these samples of each microbatch alone, by their places in it.
    """

    kinds: tuple[str, ...]
    assignment: Assignment = ONE_REPLICA
    loads: Collection[int] = (0,)
    samples: range | None = None


def planned_units(
    numbers: range,
    samples: Sequence[Sequence[Sample]],
    *,
    step: int,
    first_index: int,
    encoders: Mapping[str, EncoderUnits],
    load: Callable[[MediaBatch], LoadedUnit],
) -> list[dict[str, PlannedUnit]]:
    """Of each of these microbatches of a step of so many, with its ``samples``, by encoder."""
    found: list[dict[str, PlannedUnit]] = [{} for _ in numbers]
    for name, encoder in encoders.items():
        media = [
            MediaBatch.of(index, each, encoder=name, kinds=encoder.kinds, only=encoder.samples)
            for index, each in enumerate(samples, first_index)
        ]
        grids = [each.grids for each in media]
        assigned = encoder.assignment.of(numbers, grids, step=step)
        for units, each, shares in zip(found, media, assigned, strict=True):
            units[name] = PlannedUnit(
                media=each,
                shares=tuple(
                    _planned_share(share, each, loads=encoder.loads, load=load) for share in shares
                ),
            )
    return found


def _planned_share(
    share: Share,
    unit: MediaBatch,
    *,
    loads: Collection[int],
    load: Callable[[MediaBatch], LoadedUnit],
) -> PlannedShare:
    media = unit.part(share.media)
    loaded = partial(load, media) if share.encoder_replica in loads else None
    return PlannedShare(share=share, media=media, load=loaded)


class StepSource(Protocol):
    """Where the data of a rank's steps come from: this process, or one day a service."""

    def next_step(self) -> Iterator[PlannedMicrobatch]:
        """The microbatches of the next step, in their order.

        Each is made when it is asked for, unless the assignment compares all of a step.

        Raises:
            ValueError: a row cannot be used; with file and line.
        """
        ...

    def resume_point(self) -> ResumePoint | None:
        """Where a source of packs goes on after what was taken from this one; None without."""
        ...

    def close(self) -> None:
        """End what works in the background; nothing more can be asked for."""
        ...


class LocalSource:
    """Steps of one data parallel rank, read here, from any number of consumed samples on. Endless.

    Text and media are made apart, each in background processes of its own where ``workers`` has
    some. Every rank of a replica makes all of its text, and all make the same. Media are loaded as
    ``encoders``, by name, say. No communication.

    Which microbatches there are depends on neither the number of processes nor the split over
    ranks. ``seed=None`` keeps the file's order; ``evaluation`` says what there is instead of an
    endless stream, over and over. ``bad_samples`` says what becomes of a sample that cannot be
    used.

    With ``look_ahead``, rows are packs (see :class:`~loongplug.data.packing.PackPlanner`), and
    whatever counts samples here counts packs: a microbatch is one of them. Where ``resume`` is not
    given, packs are planned from the first sample on, however many are consumed. With ``lengths``,
    the tokens of each sample by an index, they are planned from these: text is made of the samples
    in this rank's packs alone.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        *,
        sizes: StepSizes,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int | None,
        encoders: Mapping[str, EncoderUnits],
        consumed_samples: int = 0,
        evaluation: Evaluation | None = None,
        look_ahead: int | None = None,
        lengths: NDArray[np.int32] | None = None,
        resume: ResumePoint | None = None,
        bad_samples: BadSamples | None = None,
        same: Callable[[int, Sequence[Sample], ResumePoint | None], None] = lambda *read: None,
        workers: WorkerSettings = IN_PROCESS,
    ) -> None:
        """``consumed_samples`` ends a step; ``same`` compares each microbatch with other ranks'."""
        assert look_ahead is None or micro_batch_size == 1, "a microbatch is one pack"
        self._each = micro_batch_size * dp_size
        self._packed = look_ahead is not None
        self._encoders = encoders
        self._bad_samples = bad_samples or BadSamples()
        self._same = same
        self.consumed_samples = consumed_samples  # over all data-parallel ranks
        self.decoded = 0  # media that this rank has read for its microbatches
        self._steps = sizes.microbatches(each=self._each, consumed=consumed_samples)
        # Planning runs ahead of what is taken.
        self._steps_to_plan = sizes.microbatches(each=self._each, consumed=consumed_samples)
        self._step = self._number = 0  # microbatches of the step that is planned, and the next
        self._index = 0
        self._planned: deque[PlannedMicrobatch] = deque()
        self._to_load: deque[MediaBatch] = deque()
        self._came: dict[tuple[int, str], LoadedUnit] = {}  # before they were asked for
        self._to_compare: deque[tuple[tuple[Sample, ...], ResumePoint | None]] = deque()
        # What processes keep is theirs alone: together they keep what one would.
        share = max(1, workers.processes)
        dataset.share_cache(share)
        self._texts: Background[list[int], list[Sample]] | PackedTexts | OwnPacks
        common: dict[str, Any] = {
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "workers": workers,
        }
        packed: dict[str, Any] = {
            "seed": seed,
            "look_ahead": look_ahead,
            "consumed_packs": consumed_samples,
            "resume": resume,
        }
        if evaluation is not None:
            self._texts = evaluated_texts(
                dataset, evaluation, micro_batch_size=micro_batch_size, **common
            )
        elif look_ahead is None:
            self._texts = padded_texts(
                dataset,
                micro_batch_size=micro_batch_size,
                seed=seed,
                consumed_samples=consumed_samples,
                **common,
            )
        elif lengths is None:
            self._texts = PackedTexts(dataset, **packed, **common)
        else:
            self._texts = OwnPacks(dataset, lengths=lengths, **packed, **common)
        self._load_here = UnitLoader(
            dataset.processor, videos=dataset.videos, cache_bytes=_MEDIA_CACHE_BYTES // share
        )
        self._loaded = Background(self._load_here, self._units_to_load(), settings=workers)

    def next_step(self) -> Iterator[PlannedMicrobatch]:
        """See :meth:`StepSource.next_step`."""
        return map(self._take, range(next(self._steps)))  # unlike a generator, outlives an error

    def resume_point(self) -> ResumePoint | None:
        """See :meth:`StepSource.resume_point`."""
        if self._packed and not self._planned:
            self._plan()
        return self._planned[0].begins if self._planned else None

    def close(self) -> None:
        """End the background processes."""
        self._texts.close()
        self._loaded.close()

    def _take(self, number: int) -> PlannedMicrobatch:
        if not self._planned:
            self._plan()
        # All that was planned together: who encodes what of the first may depend on the last.
        while self._to_compare:
            self._same(self._index - len(self._to_compare), *self._to_compare.popleft())
        planned = self._planned.popleft()
        assert planned.number == number, (planned.number, number)
        self.consumed_samples += self._each
        for sample in planned.samples:
            if self._bad_samples.speaks:  # else another rank of the replica counts the row
                self._bad_samples.remarks.add(sample.remarks, where=sample.where)
            if sample.bad is not None:
                self._bad_samples.meet(sample.bad)
        return planned

    def _load(self, unit: MediaBatch) -> LoadedUnit:
        if not unit.media:  # nobody else is asked for it
            return self._load_here(unit)
        while (unit.index, unit.encoder) not in self._came:
            came = next(self._loaded)
            self._came[came.index, came.encoder] = came
        loaded = self._came.pop((unit.index, unit.encoder))
        self.decoded += loaded.decoded
        self._bad_samples.used(loaded.odd)
        self._bad_samples.media[unit.encoder] += len(unit.media)
        for bad in loaded.bad.values():
            self._bad_samples.meet(bad)
        return loaded

    def _units_to_load(self) -> Iterator[MediaBatch]:
        """The units that this rank loads; plans as far ahead as they are asked for."""
        while True:
            while not self._to_load:
                self._plan()
            yield self._to_load.popleft()

    def _plan(self) -> None:
        """Make the text of as many microbatches as are assigned together."""
        if self._number == self._step:
            self._number, self._step = 0, next(self._steps_to_plan)
        number = self._number
        # What one encoder's units are assigned together with is planned with them.
        together = [each.assignment.together(self._step) for each in self._encoders.values()]
        last = any(number in each for each in together)
        numbers = range(number, self._step if last else number + 1)
        texts = [self._next_text() for _ in numbers]
        units = planned_units(
            numbers,
            [samples for samples, _ in texts],
            step=self._step,
            first_index=self._index,
            encoders=self._encoders,
            load=self._load,
        )
        self._index += len(numbers)
        self._to_compare += texts
        for place, (samples, begins), each in zip(numbers, texts, units, strict=True):
            self._planned.append(
                PlannedMicrobatch(number=place, samples=samples, units=each, begins=begins)
            )
            self._to_load += [
                share.media
                for unit in each.values()
                for share in unit.shares
                if share.load is not None and share.media.media
            ]
        self._number = numbers.stop

    def _next_text(self) -> tuple[tuple[Sample, ...], ResumePoint | None]:
        samples = tuple(next(self._texts))
        begins = None if isinstance(self._texts, Background) else self._texts.before
        return samples, begins
