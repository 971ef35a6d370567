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


def padded_texts(
    dataset: ChatDataset,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    seed: int | None,
    consumed_samples: int,
    workers: WorkerSettings,
) -> Background[list[int], list[Sample]]:
    """The samples of one microbatch after the other, each in a row of its own.

    Arguments as of :class:`~loongplug.data.source.LocalSource`. No collectives.
    """
    order = SampleOrder(len(dataset), seed=seed)
    indices = (
        order.indices(
            microbatch_positions(
                consumed, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size
            )
        )
        for consumed in count(consumed_samples, micro_batch_size * dp_size)
    )
    return Background(dataset.text_parts, indices, settings=workers)


class PackedTexts(Iterator[list[Sample]]):
    """The samples of one pack after the other; a microbatch is a pack.

    All ranks plan all packs, so that every rank reads the text of all samples, whichever packs it
    trains on; :class:`~loongplug.data.planned_packs.OwnPacks` does not. Without a place to resume
    at, the stream is planned from its first sample on. No collectives.
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
        resume: ResumePoint | None,
        workers: WorkerSettings,
    ) -> None:
        """``resume`` is a place at or before ``consumed_packs``."""
        self._order = SampleOrder(len(dataset), seed=seed)
        # All ranks take one pack each at a time.
        self._firsts, self._dp_rank = count(consumed_packs, dp_size), dp_rank
        place = resume or START
        held = [position for position, _ in place.state.held]
        self._parts = Background(
            dataset.text_parts,
            self._chunks(chain(held, count(place.state.read))),
            settings=workers,
        )
        self._samples = (sample for part in self._parts for sample in part)
        self._held = {position: next(self._samples) for position in held}
        self._planner = PackPlanner(
            seq_length=dataset.seq_length, look_ahead=look_ahead, state=place.state
        )
        self._given = place.packs  # so far

    def __next__(self) -> list[Sample]:
        """The samples of this rank's next pack."""
        first = next(self._firsts)
        while self._given < first:
            self._pack()
        self.before = ResumePoint(first, self._planner.state)
        while self._given < first + self._dp_rank:
            self._pack()
        return self._pack()

    def close(self) -> None:
        """End the background processes."""
        self._parts.close()

    def _pack(self) -> list[Sample]:
        """The next pack, of whatever rank; keeps at most the look-ahead of samples."""
        while (pack := self._planner.next_pack()) is None:
            sample = next(self._samples)
            self._held[self._planner.read] = sample
            self._planner.add(len(sample))
        self._given += 1
        return [self._held.pop(position) for position in pack]

    def _chunks(self, positions: Iterator[int]) -> Iterator[list[int]]:
        while True:
            yield self._order.indices(islice(positions, _CHUNK))
