"""The data of a step: the text of its microbatches, who encodes what, and media to come."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import tee
from typing import Any, NamedTuple

from loongplug.data.bad_samples import BadSamples
from loongplug.data.dataset import ChatDataset
from loongplug.data.media_loader import UnitLoader
from loongplug.data.planned_media import (
    EncoderUnits,
    LoadedUnit,
    MeasuredSamples,
    MediaBatch,
    MicrobatchText,
    PlannedMicrobatch,
    StepDraft,
    planned_units,
)
from loongplug.data.sample import UNUSABLE, Grid, Sample, as_indexed
from loongplug.data.sample_order import (
    START,
    Evaluation,
    Packing,
    PackStream,
    ResumePoint,
    SampleOrder,
    StepSizes,
    padded_slots,
)
from loongplug.data.workers import IN_PROCESS, Ordered, Pool, WorkerSettings

_MEDIA_CACHE_BYTES = 256 * 2**20


class LocalSource:
    """Steps of data parallel ranks, read here, from any number of consumed samples on. Endless.

    ``parts`` are, by rank in ascending order, which samples of its microbatches are taken, None for
    all: a rank that decodes takes its own; one that encodes alone, parts of several in turn.

    Which rows a microbatch has follows from their number or from their extents: of the dataset's
    index or, without one, of the samples, which are made first. Text and media are made by one pool
    of ``workers``, ahead up to a number of results and of bytes. Every rank of a replica makes the
    same text; with an index and without ``text``, none. No communication.

    ``seed=None`` keeps the file's order; ``evaluation`` says what there is instead of an endless
    stream. With ``look_ahead``, rows are packs, and whatever counts samples here counts packs;
    without ``resume``, they are planned from the first sample on.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        *,
        sizes: StepSizes,
        micro_batch_size: int,
        parts: Mapping[int, range | None],
        dp_size: int,
        seed: int | None,
        encoders: Mapping[str, EncoderUnits],
        consumed_samples: int = 0,
        evaluation: Evaluation | None = None,
        look_ahead: int | None = None,
        resume: ResumePoint | None = None,
        bad_samples: BadSamples | None = None,
        same: Callable[[int, int, Sequence[Sample], ResumePoint | None], None] = lambda *read: None,
        text: bool = True,
        workers: WorkerSettings = IN_PROCESS,
    ) -> None:
        """``consumed_samples`` ends a step; ``same`` compares each microbatch with other ranks'."""
        assert look_ahead is None or micro_batch_size == 1, "a microbatch is one pack"
        self._parts = tuple(parts.items())  # of each round, in which all ranks make a microbatch
        self._dataset = dataset
        self._extents = dataset.extents
        self._micro_batch_size = micro_batch_size
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
        self._step = self._number = 0  # parts of the step that is planned, and the next
        self._index = 0  # of the next text
        self._drafts: deque[StepDraft] = deque()
        self._planned: deque[PlannedMicrobatch] = deque()
        self._fault: Exception | None = None  # of planning ahead, until that is reached
        self._to_load: deque[_Load] = deque()
        self._loading: set[_Load] = set()
        share = max(1, workers.processes)  # together they keep what one would
        dataset.share_cache(share)
        load = UnitLoader(dataset, cache_bytes=_MEDIA_CACHE_BYTES // share)
        self._bytes_of = load.bytes_of
        self._pool: Pool[Any, Any] = Pool(partial(_made, dataset, encoders, load), settings=workers)
        order = SampleOrder(len(dataset), seed=seed)
        own: dict[str, Any] = {"dp_ranks": tuple(parts), "dp_size": dp_size}
        samples: Callable[[], Sequence[Sample]] | None = None
        self._measured: Ordered[Any, Any] | None = None  # what extents come from, without an index
        if evaluation is not None:
            slots = evaluation.slots(micro_batch_size=micro_batch_size, **own)
        elif look_ahead is None:
            slots = padded_slots(
                order, micro_batch_size=micro_batch_size, consumed=consumed_samples, **own
            )
        else:
            place = resume or START
            packing = Packing(seq_length=dataset.seq_length, look_ahead=look_ahead)
            if self._extents is None:
                measured = MeasuredSamples(self._pool, order, place)
                self._measured = measured.chunks
                packs = PackStream(measured.length, packing=packing, place=place)
                slots = packs.slots(order, consumed=consumed_samples, taken=measured.taken, **own)
                samples = measured.own.popleft
            else:
                lengths = self._extents.lengths(seq_length=dataset.seq_length)
                packs = PackStream(
                    lambda at: int(lengths[order.index(at)]), packing=packing, place=place
                )
                slots = packs.slots(order, consumed=consumed_samples, **own)
        if samples is None and (text or self._extents is None):
            slots, same_slots = tee(slots)
            texts = self._pool.ordered(slot.rows for slot in same_slots)
            samples = texts.__next__
            if self._extents is None:
                self._measured = texts
        self._slots = slots
        self._samples = samples  # of the next slot; None: they are of no use here

    def next_step(self) -> Iterator[PlannedMicrobatch]:
        """The microbatches of the next step, in their order; ValueError for a row with a fault."""
        step = next(self._steps) * len(self._parts)
        return map(self._take, range(step))  # unlike a generator, outlives an error

    def resume_point(self) -> ResumePoint | None:
        """Where a source of packs goes on after what was taken from this one; None without."""
        if self._packed:
            self._require_planned()
        return self._planned[0].begins if self._planned else None

    def close(self) -> None:
        self._pool.close()

    def _take(self, place: int) -> PlannedMicrobatch:
        self._require_planned()
        planned = self._planned.popleft()
        number, part = divmod(place, len(self._parts))
        assert planned.number == number, (planned.number, number)
        if part == len(self._parts) - 1:
            self.consumed_samples += self._each
        self._work_ahead()
        return planned

    def _require_planned(self) -> None:
        if not self._planned:
            if self._fault is not None:
                raise self._fault
            self._plan()

    def _plan(self) -> None:
        """Say who encodes what of as many microbatches as are assigned together."""
        draft = self._drafts.popleft() if self._drafts else self._drafted()
        for name, (media, work) in draft.plans.items():
            self._encoders[name].assignment.by_plan.keep(media, work.result())
        units = planned_units(
            draft.numbers,
            draft.media,
            step=draft.step,
            replicas=[each.replica for each in draft.texts],
            encoders=self._encoders,
            load=self._to_be_loaded,
        )
        for place, text, each in zip(draft.numbers, draft.texts, units, strict=True):
            self._planned.append(
                PlannedMicrobatch(
                    number=place // len(self._parts),
                    extents=text.extents,
                    units=each,
                    text=partial(self._text, text),
                    replica=text.replica,
                    taken=text.taken,
                    begins=text.begins,
                )
            )

    def _drafted(self) -> StepDraft:
        """What is known of the next microbatches that are assigned together."""
        numbers = self._together()
        texts = [self._next_text() for _ in numbers]
        media = {
            name: [
                MediaBatch.of(
                    each.number,
                    each.rows,
                    each.extents,
                    encoder=name,
                    kinds=encoder.kinds,
                    only=each.taken,
                )
                for each in texts
            ]
            for name, encoder in self._encoders.items()
        }
        plans: dict[str, tuple[Any, Future[Any]]] = {}
        for name, encoder in self._encoders.items():
            if encoder.assignment.by_plan is not None and self._pool.settings.processes:
                grids = tuple(each.grids for each in media[name])
                plans[name] = grids, self._pool.submit(_Plan(name, grids), soon=True)
        self._number = numbers.stop
        return StepDraft(numbers, self._step, texts, media, plans)

    def _together(self) -> range:
        """The next microbatches that are assigned together."""
        if self._number == self._step:
            self._number, self._step = 0, next(self._steps_to_plan) * len(self._parts)
        number = self._number
        # What one encoder's units are assigned together with is planned with them.
        assignments = [each.assignment for each in self._encoders.values()]
        last = any(number in each.together(self._step) for each in assignments)
        return range(number, self._step if last else number + 1)

    def _next_text(self) -> MicrobatchText:
        slot = next(self._slots)
        blank = max(0, self._micro_batch_size - len(slot.rows))
        rows = (*slot.rows, *(-1,) * blank)
        number, part = divmod(self._index, len(self._parts))
        self._index += 1
        replica, taken = self._parts[part]
        made = partial(MicrobatchText, replica, taken, number, rows)
        if self._extents is None:
            samples = self._samples_of(rows)
            if self._packed and sum(map(len, samples)) > (most := self._dataset.seq_length):
                raise ValueError(
                    f"{max(samples, key=len).where}: the sample's pack is longer than --seq-length"
                    f" {most}: rows or media have changed since they were measured. Start again."
                )
            # Ranks agree on them before anything is planned by them.
            self._same(replica, number, samples, slot.begins)
            return made(tuple(each.extent for each in samples), slot.begins, samples)
        known = map(self._extents.row, slot.rows)
        fitting = (x if x.tokens <= self._dataset.seq_length else UNUSABLE for x in known)
        return made((*fitting, *(UNUSABLE,) * blank), slot.begins, None)

    def _samples_of(self, rows: Sequence[int]) -> tuple[Sample, ...]:
        """The samples of the next slot, whose rows these are."""
        assert self._samples is not None, "there is no index, or a text is asked for"
        return (*self._samples(), *(Sample.blank(),) * rows.count(-1))

    def _text(self, text: MicrobatchText) -> tuple[Sample, ...]:
        samples = text.samples
        if samples is None and self._samples is None:
            return tuple(map(Sample.outline, text.extents))
        if samples is None:
            samples = tuple(map(as_indexed, self._samples_of(text.rows), text.extents))
            self._same(text.replica, text.number, samples, text.begins)
        for sample in samples:
            if sample.remarks and self._bad_samples.speaks:  # else another rank counts the row
                self._bad_samples.remarks.add(sample.remarks, where=sample.where)
            if sample.bad is not None:
                self._bad_samples.meet(sample.bad)
        return samples

    def _to_be_loaded(self, unit: MediaBatch) -> Callable[[], LoadedUnit]:
        load = _Load(unit, self._bytes_of(unit))
        if unit.media:
            self._to_load.append(load)
        return partial(self._loaded, load)

    def _loaded(self, load: "_Load") -> LoadedUnit:
        if load.work is None:  # it was not begun ahead
            if load.unit.media:
                self._to_load.remove(load)
            load.work = self._pool.submit(load.unit)
        loaded: LoadedUnit = load.work.result()
        load.work = None  # else rows would be held as long as somebody holds the microbatch
        self._loading.discard(load)
        self.decoded += loaded.decoded
        if loaded.odd:
            self._bad_samples.used(loaded.odd)
        self._bad_samples.media[load.unit.encoder] += len(load.unit.media)
        for bad in loaded.bad.values():
            self._bad_samples.meet(bad)
        self._work_ahead()
        return loaded

    def _work_ahead(self) -> None:
        """Begin to load what is needed next, and plan behind it; an index waits for nothing."""
        settings = self._pool.settings
        most = settings.processes * settings.depth
        try:
            while self._fault is None and len(self._loading) < most:
                # Planners keep the plans of some 30 steps.
                if not self._to_load and len(self._planned) < min(most, 16 * max(1, self._step)):
                    if not self._drafts:
                        if not self._known():
                            break
                        self._drafts.append(self._drafted())
                    if not all(work.done() for _, work in self._drafts[0].plans.values()):
                        break
                    self._plan()
                    continue
                ahead = sum(each.nbytes for each in self._loading)
                if not self._to_load or ahead > settings.most_bytes:
                    break
                load = self._to_load[0]
                load.work = self._pool.submit(load.unit)  # of a pool that is over, an error
                self._loading.add(self._to_load.popleft())
            if self._extents is not None and most and not self._drafts:
                self._drafts.append(self._drafted())
        except Exception as error:
            self._fault = error

    def _known(self) -> bool:
        """Whether extents of the next microbatches that are planned need not be waited for."""
        return self._measured is None or self._measured.made(len(self._together()))


@dataclass(eq=False)
class _Load:
    """A share's media, which are to be loaded here."""

    unit: MediaBatch
    nbytes: int  # of its rows, once loaded
    work: Future[LoadedUnit] | None = None


class _Plan(NamedTuple):
    encoder: str
    media: Sequence[Sequence[Grid]]


def _made(
    dataset: ChatDataset,
    encoders: Mapping[str, EncoderUnits],
    load: UnitLoader,
    job: tuple[int, ...] | MediaBatch | _Plan,
) -> Any:
    """Samples of rows, the rows of a unit's media, or a plan; stateless but for caches."""
    if isinstance(job, MediaBatch):
        return load(job)
    if isinstance(job, _Plan):
        return encoders[job.encoder].assignment.by_plan.plan(job.media)
    return dataset.text_parts(job)
