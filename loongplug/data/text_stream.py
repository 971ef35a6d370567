"""The text parts of a data parallel rank's microbatches, in the order of the run."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, count, islice
from typing import Any, Self

from loongplug.data.dataset import ChatDataset, Sample
from loongplug.data.order import SampleOrder, microbatch_positions
from loongplug.data.packing import PackingState, PackPlanner
from loongplug.data.workers import Background, WorkerSettings

# Where packs are planned: samples per piece of work of a background process.
_CHUNK = 16


@dataclass(frozen=True)
class ResumePoint:
    """A place in a stream of packs, to go on from without planning what is before it."""

    packs: int  # how many there are before
    state: PackingState

    def plain(self) -> dict[str, Any]:
        """As lists and numbers."""
        return asdict(self)

    @classmethod
    def of_plain(cls, data: dict[str, Any]) -> Self:
        """What :meth:`plain` gave."""
        held = tuple((position, length) for position, length in data["state"]["held"])
        return cls(data["packs"], PackingState(read=data["state"]["read"], held=held))


START = ResumePoint(0, PackingState(read=0, held=()))


class PaddedTexts(Iterator[list[Sample]]):
    """The samples of one microbatch after the other, each in a row of its own.

    Arguments as of :class:`~loongplug.data.source.LocalSource`. No collectives.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int | None,
        consumed_samples: int,
        restart_after: int | None,
        workers: WorkerSettings,
    ) -> None:
        order = SampleOrder(len(dataset), seed=seed, restart_after=restart_after)
        indices = (
            order.indices(
                microbatch_positions(
                    consumed, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size
                )
            )
            for consumed in count(consumed_samples, micro_batch_size * dp_size)
        )
        self._parts = Background(dataset.text_parts, indices, settings=workers)

    def __next__(self) -> list[Sample]:
        """The next microbatch's samples."""
        return next(self._parts)

    def close(self) -> None:
        """End the background processes."""
        self._parts.close()


class PackStream(Iterator[list[Sample]]):
    """Pack after pack, each with its samples; the same on every rank that reads the same samples.

    A rank that trains on some of the packs still takes the lengths of all. At most the planner's
    look-ahead of samples is kept. No collectives.
    """

    def __init__(self, samples: Iterator[Sample], planner: PackPlanner) -> None:
        """``samples`` are those that ``planner`` holds back already, by position, and then those
        from ``planner.read`` on.
        """
        self._samples = samples
        self._planner = planner
        self._held = {position: next(samples) for position, _ in planner.state.held}
        self.given = 0  # packs so far

    @property
    def state(self) -> PackingState:
        """The planner's, for a stream that begins with the next pack."""
        return self._planner.state

    def __next__(self) -> list[Sample]:
        """The next pack. Ends, when the samples do, with what is left of them in packs."""
        ended = False
        while (pack := self._planner.next_pack(ended=ended)) is None:
            if ended:
                raise StopIteration
            sample = next(self._samples, None)
            ended = sample is None
            if sample is not None:
                self._held[self._planner.read] = sample
                self._planner.add(len(sample.input_ids))
        self.given += 1
        return [self._held.pop(position) for position in pack]


class PackedTexts(Iterator[list[Sample]]):
    """The samples of one pack after the other; a microbatch is a pack.

    All ranks plan all packs, so that every rank reads the text of all samples, whichever packs it
    trains on. Without a place to resume at, the stream is planned from its first sample on. No
    collectives.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        *,
        look_ahead: int,
        dp_rank: int,
        dp_size: int,
        seed: int | None,
        consumed_packs: int,
        restart_after: int | None,
        resume: ResumePoint | None,
        workers: WorkerSettings,
    ) -> None:
        """``restart_after`` is in packs; ``resume`` a place at or before ``consumed_packs``."""
        self._dataset = dataset
        self._look_ahead = look_ahead
        self._order = SampleOrder(len(dataset), seed=seed)
        self._numbers = count(consumed_packs + dp_rank, dp_size)
        self._restart_after = restart_after
        self._workers = workers
        self._dp_rank = dp_rank
        self._start(resume or START)

    def __next__(self) -> list[Sample]:
        """The samples of this rank's next pack."""
        number = next(self._numbers)
        if self._restart_after is not None:
            number %= self._restart_after
        # All ranks take one pack each at a time; this is the first of them.
        first = number - self._dp_rank
        if first < self._packs_given:
            self.close()
            self._start(START)
        while self._packs_given < first:
            self._skip()
        self.before = ResumePoint(first, self._packs.state)
        while self._packs_given < number:
            self._skip()
        return self._skip()

    def close(self) -> None:
        """End the background processes."""
        self._parts.close()

    def _skip(self) -> list[Sample]:
        self._packs_given += 1
        return next(self._packs)

    def _start(self, place: ResumePoint) -> None:
        state = place.state
        held = [position for position, _ in state.held]
        self._parts = Background(
            self._dataset.text_parts,
            self._chunks(chain(held, count(state.read))),
            settings=self._workers,
        )
        samples = (sample for part in self._parts for sample in part)
        planner = PackPlanner(
            seq_length=self._dataset.seq_length, look_ahead=self._look_ahead, state=state
        )
        self._packs = PackStream(samples, planner)
        self._packs_given = place.packs

    def _chunks(self, positions: Iterator[int]) -> Iterator[list[int]]:
        while True:
            yield self._order.indices(islice(positions, _CHUNK))
