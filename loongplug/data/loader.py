"""The iterator that training pulls microbatches from."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from torch import Tensor

from loongplug.data.bad_samples import BadSample, BadSamples
from loongplug.data.collate import collate
from loongplug.data.dataset import ChatDataset, Sample
from loongplug.data.microbatch import Microbatch, VisionInput
from loongplug.data.order import SampleOrder, microbatch_positions
from loongplug.data.units import EncodesAll, EncodesNone, LoadedUnit, Unit, UnitLoader, UnitRoles
from loongplug.data.workers import IN_PROCESS, Background, WorkerSettings


@dataclass(frozen=True)
class _Planned:
    """A microbatch whose text parts are made."""

    samples: tuple[Sample, ...]
    bad: tuple[BadSample, ...]  # those that are blank among the samples
    unit: Unit


_MEDIA_CACHE_BYTES = 256 * 2**20


class MicrobatchLoader(Iterator[Microbatch]):
    """Endless microbatches of one data-parallel rank, from any number of consumed samples on.

    Text and vision parts are made apart, each in background processes of its own where
    ``workers`` has some. Every rank of a data-parallel replica makes the text part itself, and
    all make the same. The vision part is loaded by the ranks that ``roles`` name, by unit:
    ``with_images`` is short for a rank that loads all or none, alone.

    Which microbatches there are depends on neither the number of processes nor the split over
    ranks. ``seed=None`` keeps the file's order; ``restart_after`` (in samples, over all
    data-parallel ranks) starts the stream over, for evaluations that shall see the same samples
    each time. ``bad_samples`` says what becomes of a sample that cannot be used: where it may be
    left out, its row stays empty, or, when only its pixels are bad, untrained and without them.
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
        bad_samples: BadSamples | None = None,
        workers: WorkerSettings = IN_PROCESS,
    ) -> None:
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._roles = roles or (EncodesAll() if with_images else EncodesNone())
        self._order = SampleOrder(len(dataset), seed=seed, restart_after=restart_after)
        self._bad_samples = bad_samples or BadSamples()
        self.consumed_samples = consumed_samples  # over all data-parallel ranks
        self.decoded = 0  # images and videos that this rank has read for its microbatches
        self._pin = workers.pin_memory
        self._planned: deque[_Planned] = deque()
        self._to_load: deque[Unit] = deque()
        self._next_unit = 0
        # What processes keep is theirs alone: together they keep what one would.
        share = max(1, workers.processes)
        dataset.share_cache(share)
        self._text_parts = Background(
            dataset.text_parts, self._indices(consumed_samples), settings=workers
        )
        self._vision_parts = Background(
            UnitLoader(
                dataset.processor, videos=dataset.videos, cache_bytes=_MEDIA_CACHE_BYTES // share
            ),
            self._units_to_load(),
            settings=workers,
        )

    def __next__(self) -> Microbatch:
        """The next microbatch; ValueError with file and line for a row that cannot be used."""
        if not self._planned:
            self._plan()
        planned = self._planned.popleft()
        for bad in planned.bad:
            self._bad_samples.meet(bad)
        loaded = self._loaded(planned.unit)
        pixels, bad_numbers = self._roles.deliver(planned.unit, loaded)
        samples = [
            sample.untrained() if number in bad_numbers else sample
            for number, sample in enumerate(planned.samples)
        ]
        microbatch = collate(
            samples,
            pad_token_id=self._dataset.processor.pad_token_id,
            seq_length=self._dataset.seq_length,
            media=None,
        )
        if self._pin:
            microbatch = _pinned(microbatch)
        if pixels is not None:
            vision = VisionInput(pixels=pixels, grid_thw=planned.unit.grid_thw())
            microbatch = replace(microbatch, vision=vision)
        self.consumed_samples += self._micro_batch_size * self._dp_size
        return microbatch

    def close(self) -> None:
        """End the background processes."""
        self._text_parts.close()
        self._vision_parts.close()

    def _loaded(self, unit: Unit) -> LoadedUnit | None:
        if not self._roles.loads(unit.index):
            return None
        loaded = next(self._vision_parts)
        assert loaded.index == unit.index, (loaded.index, unit.index)
        self.decoded += loaded.decoded
        for bad in loaded.bad.values():
            self._bad_samples.meet(bad)
        return loaded

    def _indices(self, consumed_samples: int) -> Iterator[list[int]]:
        """The samples of each microbatch to come."""
        while True:
            yield self._order.indices(
                microbatch_positions(
                    consumed_samples,
                    micro_batch_size=self._micro_batch_size,
                    dp_rank=self._dp_rank,
                    dp_size=self._dp_size,
                )
            )
            consumed_samples += self._micro_batch_size * self._dp_size

    def _units_to_load(self) -> Iterator[Unit]:
        """The units that this rank loads; plans as far ahead as they are asked for."""
        while True:
            while not self._to_load:
                self._plan()
            yield self._to_load.popleft()

    def _plan(self) -> None:
        parts = next(self._text_parts)
        samples = tuple(Sample.blank() if isinstance(p, BadSample) else p for p in parts)
        bad = tuple(part for part in parts if isinstance(part, BadSample))
        unit = Unit.of(self._next_unit, samples)
        self._next_unit += 1
        self._planned.append(_Planned(samples, bad, unit))
        if self._roles.loads(unit.index):
            self._to_load.append(unit)


def _pinned(microbatch: Microbatch) -> Microbatch:
    """The same in page-locked memory."""
    values = {field.name: getattr(microbatch, field.name) for field in fields(microbatch)}
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = value.pin_memory()
    return Microbatch(**values)
