"""The iterator that training pulls microbatches from."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from loongplug.data.bad_samples import BadSamples
from loongplug.data.collate import collate
from loongplug.data.dataset import ChatDataset, Sample
from loongplug.data.microbatch import ALL_TEXT, Microbatch, TextNeeds, VisionInput
from loongplug.data.text_stream import PackedTexts, PaddedTexts, ResumePoint
from loongplug.data.units import (
    EncodesAll,
    EncodesNone,
    LoadedUnit,
    MediaBatch,
    UnitLoader,
    UnitRoles,
)
from loongplug.data.workers import IN_PROCESS, Background, WorkerSettings

_MEDIA_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _Planned:
    """A microbatch whose text parts are made."""

    samples: list[Sample]
    unit: MediaBatch
    resume: ResumePoint | None  # the place of it and its neighbours in a stream of packs


class MicrobatchLoader(Iterator[Microbatch]):
    """Endless microbatches of one data-parallel rank, from any number of consumed samples on.

    Text and vision parts are made apart, each in background processes of its own where
    ``workers`` has some. Every rank of a data-parallel replica makes the text part itself, and
    all make the same. The vision part is loaded, by unit, by the ranks that ``roles`` name;
    ``with_images`` is short for a rank that loads all or none, with no word to others.

    Which microbatches there are depends on neither the number of processes nor the split over
    ranks. ``seed=None`` keeps the file's order; ``restart_after`` (in samples, over all
    data-parallel ranks) starts the stream over, for evaluations that shall see the same samples
    each time. ``bad_samples`` says what becomes of a sample that cannot be used: where it may be
    left out, its row stays empty, or, when only its pixels are bad, untrained and without them.

    ``needs`` says what of the text its microbatches hold; the rest is None.

    With ``look_ahead``, rows are packs (see :class:`~loongplug.data.packing.PackPlanner`), and
    whatever counts samples here counts packs: a microbatch is one of them. Where ``resume`` is not
    given, packs are planned from the first sample on, however many are consumed.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int | None,
        with_images: bool = False,
        roles: UnitRoles | None = None,
        consumed_samples: int = 0,
        restart_after: int | None = None,
        look_ahead: int | None = None,
        resume: ResumePoint | None = None,
        bad_samples: BadSamples | None = None,
        needs: TextNeeds = ALL_TEXT,
        workers: WorkerSettings = IN_PROCESS,
    ) -> None:
        assert look_ahead is None or micro_batch_size == 1, "a microbatch is one pack"
        self._dataset = dataset
        self._step = micro_batch_size * dp_size
        self._packed = look_ahead is not None
        self._roles = roles or (EncodesAll() if with_images else EncodesNone())
        self._bad_samples = bad_samples or BadSamples()
        self._needs = needs
        self._pin = workers.pin_memory
        self.consumed_samples = consumed_samples  # over all data-parallel ranks
        self.decoded = 0  # images and videos that this rank has read for its microbatches
        self._planned: deque[_Planned] = deque()
        self._to_load: deque[MediaBatch] = deque()
        self._next_unit = 0
        # What processes keep is theirs alone: together they keep what one would.
        share = max(1, workers.processes)
        dataset.share_cache(share)
        self._texts: PaddedTexts | PackedTexts
        if look_ahead is None:
            self._texts = PaddedTexts(
                dataset,
                micro_batch_size=micro_batch_size,
                dp_rank=dp_rank,
                dp_size=dp_size,
                seed=seed,
                consumed_samples=consumed_samples,
                restart_after=restart_after,
                workers=workers,
            )
        else:
            self._texts = PackedTexts(
                dataset,
                look_ahead=look_ahead,
                dp_rank=dp_rank,
                dp_size=dp_size,
                seed=seed,
                consumed_packs=consumed_samples,
                restart_after=restart_after,
                resume=resume,
                workers=workers,
            )
        load = UnitLoader(
            dataset.processor, videos=dataset.videos, cache_bytes=_MEDIA_CACHE_BYTES // share
        )
        self._loaded = Background(load, self._units_to_load(), settings=workers)

    def __next__(self) -> Microbatch:
        """The next microbatch; ValueError with file and line for a row that cannot be used."""
        if not self._planned:
            self._plan()
        planned = self._planned.popleft()
        for sample in planned.samples:
            if sample.bad is not None:
                self._bad_samples.meet(sample.bad)
        loaded = self._load(planned.unit)
        pixels, bad = self._roles.deliver(planned.unit, loaded)
        processor, unit = self._dataset.processor, planned.unit
        self.consumed_samples += self._step
        return collate(
            [
                sample.untrained() if number in bad else sample
                for number, sample in enumerate(planned.samples)
            ],
            pad_token_id=processor.pad_token_id,
            seq_length=self._dataset.seq_length,
            visual_token_ids=(processor.image_token_id, processor.video_token_id),
            packed=self._packed,
            needs=self._needs,
            vision=None if pixels is None else VisionInput(pixels=pixels, grid_thw=unit.grid_thw()),
            patches=unit.patches,
            owner=unit.owner,
            pins=self._pin,
        )

    def resume_point(self) -> ResumePoint | None:
        """Where a loader of packs goes on that has consumed as many; None without packs."""
        if self._packed and not self._planned:
            self._plan()
        return self._planned[0].resume if self._planned else None

    def close(self) -> None:
        """End the background processes."""
        self._texts.close()
        self._loaded.close()

    def _load(self, unit: MediaBatch) -> LoadedUnit | None:
        """The unit, where this rank loads it."""
        if not self._roles.loads(unit):
            return None
        loaded = next(self._loaded)
        assert loaded.index == unit.index, (loaded.index, unit.index)
        self.decoded += loaded.decoded
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
        """Make the text parts of as many microbatches as are assigned together."""
        block = [self._next_text() for _ in range(self._roles.block(self._next_unit))]
        owners = self._roles.owners([planned.unit for planned in block])
        for planned, owner in zip(block, owners, strict=True):
            unit = replace(planned.unit, owner=owner)
            self._planned.append(replace(planned, unit=unit))
            if self._roles.loads(unit):
                self._to_load.append(unit)

    def _next_text(self) -> _Planned:
        samples = next(self._texts)
        unit = MediaBatch.of(self._next_unit, samples)
        self._next_unit += 1
        place = self._texts.before if isinstance(self._texts, PackedTexts) else None
        return _Planned(samples, unit, place)
