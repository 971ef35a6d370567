"""Which samples each step and each microbatch has: rows, packs, and those of an evaluation. Pure.

All data-parallel ranks walk one endless stream of positions, of which a global batch is the next
piece, whatever the number of ranks and the microbatch size.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count, cycle, islice, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from loongplug.data.packing import Pack, PackingState, PackPlanner, packs_once


def microbatch_positions(
    consumed_samples: int, *, micro_batch_size: int, dp_rank: int, dp_size: int
) -> range:
    """Stream positions of the microbatch that a rank makes when so many samples are consumed."""
    start = consumed_samples + dp_rank * micro_batch_size
    return range(start, start + micro_batch_size)


class SampleOrder:
    """The endless stream: position to sample index.

    Each epoch goes once through all samples, in an order that follows from the seed and its number.
    """

    def __init__(self, num_samples: int, *, seed: int | None) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self._epoch: tuple[int, NDArray[np.int64]] | None = None  # the latest, kept for speed

    def indices(self, positions: Iterable[int]) -> list[int]:
        return [self.index(position) for position in positions]

    def index(self, position: int) -> int:
        epoch, offset = divmod(position, self._num_samples)
        if self._seed is None:
            return offset
        if self._epoch is None or self._epoch[0] != epoch:
            permutation = epoch_permutation(self._num_samples, seed=self._seed, epoch=epoch)
            self._epoch = epoch, permutation
        return int(self._epoch[1][offset])


def epoch_permutation(num_samples: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    # RandomState is the one generator of numpy whose numbers are promised never to change:
    # a run must be able to resume after an upgrade.
    return np.random.RandomState([seed, epoch]).permutation(num_samples)


@dataclass(frozen=True)
class ResumePoint:
    """A place in a stream of packs, to go on from without planning what is before it."""

    packs: int  # how many there are before
    state: PackingState

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_plain(cls, data: dict[str, Any]) -> Self:
        held = tuple((position, length) for position, length in data["state"]["held"])
        return cls(data["packs"], PackingState(read=data["state"]["read"], held=held))


START = ResumePoint(0, PackingState(read=0, held=()))


class Slot(NamedTuple):
    """A microbatch of a data parallel rank before anything of it is read."""

    rows: tuple[int, ...]
    begins: ResumePoint | None = None  # where a stream of packs goes on that begins with it


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How a stream of rows is packed: see :class:`~loongplug.data.packing.PackPlanner`."""

    seq_length: int
    look_ahead: int


def padded_slots(
    order: SampleOrder,
    *,
    micro_batch_size: int,
    dp_ranks: Collection[int],
    dp_size: int,
    consumed: int,
) -> Iterator[Slot]:
    """Rows of their own, from so many ``consumed`` samples on, of each of these ranks in turn."""
    sizes = {"micro_batch_size": micro_batch_size, "dp_size": dp_size}
    for start in count(consumed, micro_batch_size * dp_size):
        for rank in dp_ranks:
            positions = microbatch_positions(start, dp_rank=rank, **sizes)
            yield Slot(tuple(order.indices(positions)))


class PackStream:
    """The packs of an endless stream of samples, of all ranks, one after the other.

    ``length`` is asked for each position once: first for those that are held back at ``place``.
    """

    def __init__(
        self, length: Callable[[int], int], *, packing: Packing, place: ResumePoint = START
    ) -> None:
        self._length = length
        held = tuple((position, length(position)) for position, _ in place.state.held)
        self._planner = PackPlanner(
            seq_length=packing.seq_length,
            look_ahead=packing.look_ahead,
            state=PackingState(read=place.state.read, held=held),
        )
        self.given = place.packs  # so far

    def next(self) -> Pack:
        while (pack := self._planner.next_pack()) is None:
            self._planner.add(self._length(self._planner.read))
        self.given += 1
        return pack

    def slots(
        self,
        order: SampleOrder,
        *,
        dp_ranks: Collection[int],
        dp_size: int,
        consumed: int,
        taken: Callable[[Pack, bool], None] = lambda pack, own: None,
    ) -> Iterator[Slot]:
        """The packs of these ranks, from so many ``consumed`` on; ``taken`` hears of all packs."""
        for first in count(consumed, dp_size):
            while self.given < first:
                taken(self.next(), False)
            begins = ResumePoint(self.given, self._planner.state)
            for rank in range(max(dp_ranks) + 1):
                pack = self.next()
                taken(pack, rank in dp_ranks)
                if rank in dp_ranks:
                    yield Slot(tuple(order.indices(pack)), begins)


def packs_of_epochs(lengths: NDArray[np.int32], *, seed: int, packing: Packing, epochs: int) -> int:
    """How many packs of the stream hold all samples of its first epochs."""
    order = SampleOrder(len(lengths), seed=seed)
    packs = PackStream(lambda at: int(lengths[order.index(at)]), packing=packing)
    while packs.next()[0] < epochs * len(lengths):  # a pack's first sample has waited longest
        pass
    return packs.given - 1


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The places of an evaluation, all ranks' together: a row each or, with ``packs``, a pack.

    Rows come in their order, each once, blank places last: by the rows' number or lengths alone.
    """

    rows: int  # that are evaluated
    of_rows: int  # that there are
    batch: int  # places of a step
    packs: tuple[Pack, ...] | None

    @classmethod
    def plan(
        cls,
        rows: int,
        *,
        batch: int,
        most_steps: int | None,
        packing: Packing | None = None,
        lengths: Iterable[int] = (),
    ) -> Self:
        """Of all ``rows``, or of the first, as many as ``most_steps`` have places for."""
        places = rows if most_steps is None else min(rows, most_steps * batch)
        if packing is None:
            return cls(rows=places, of_rows=rows, batch=batch, packs=None)
        found = packs_once(lengths, seq_length=packing.seq_length, look_ahead=packing.look_ahead)
        packs = tuple(islice(found, places))
        return cls(rows=sum(map(len, packs)), of_rows=rows, batch=batch, packs=packs)

    @property
    def steps(self) -> int:
        """How many there are, the last of which may be short."""
        places = self.rows if self.packs is None else len(self.packs)
        return -(-places // self.batch)

    def rows_at(self, places: range) -> tuple[int, ...]:
        """The rows of these places; none of blank ones."""
        if self.packs is None:
            return tuple(place for place in places if place < self.rows)
        return tuple(row for pack in self.packs[places.start : places.stop] for row in pack)

    def slots(
        self, *, micro_batch_size: int, dp_ranks: Collection[int], dp_size: int
    ) -> Iterator[Slot]:
        """These ranks' microbatches of one evaluation after the other, in turn."""
        # As of training: neighbours are made at one time, by all ranks together.
        sizes = {"micro_batch_size": micro_batch_size, "dp_size": dp_size}
        for start in cycle(range(0, self.steps * self.batch, dp_size * micro_batch_size)):
            for rank in dp_ranks:
                yield Slot(self.rows_at(microbatch_positions(start, dp_rank=rank, **sizes)))

    def __str__(self) -> str:
        packed = "" if self.packs is None else f" in {len(self.packs)} packs"
        return (
            f"{self.rows} of {self.of_rows} rows{packed}, each once, in {self.steps} steps of "
            f"{self.batch}"
        )


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The global batch of a run. Nothing else says where its steps begin.

    ``sizes`` are pairs: how many samples have to be consumed before a step for it to take so many.
    The first is for 0 samples; both numbers ascend.
    """

    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, size: int) -> Self:
        return cls(sizes=((0, size),))

    @classmethod
    def ramp(cls, *, start: int, increment: int, samples: int, end: int) -> Self:
        """From ``start`` to ``end`` in equal parts of ``samples``, ``increment`` more in each."""
        if start < 1 or increment < 1 or samples < 0:
            raise ValueError("expected a start and an increment of 1 or more and 0 samples or more")
        if end < start or (end - start) % increment:
            raise ValueError(f"steps of {increment} do not lead from {start} to {end}")
        parts = (end - start) // increment or 1
        # Of sizes that begin at one sample, the largest stays.
        begins = {
            -(-samples * part // parts): start + part * increment
            for part in range((end - start) // increment + 1)
        }
        return cls(sizes=tuple(begins.items()))

    @property
    def largest(self) -> int:
        return self.sizes[-1][1]

    @property
    def vary(self) -> bool:
        return len(self.sizes) > 1

    def schedule(self, *, seq_length: int) -> str:
        """As Megatron's ``--step-batch-size-schedule``, which counts tokens."""
        return " ".join(f"{begin * seq_length}:{size}" for begin, size in self.sizes)

    def at(self, consumed: int) -> int:
        """The size of a step that begins when so many samples are consumed."""
        return next(size for begin, size in reversed(self.sizes) if begin <= consumed)

    def microbatches(self, *, each: int, consumed: int = 0) -> Iterator[int]:
        """How many microbatches each step has, of those from ``consumed`` samples on. Endless.

        ``each``: samples of a microbatch of all data parallel ranks together. What of a size is
        no whole microbatch is left out, as Megatron does where it may decrease a batch.
        """
        while True:
            count = self.at(consumed) // each
            assert count, (self.sizes, each)
            yield count
            consumed += count * each

    def steps(self, samples: int, *, each: int) -> int:
        """The fewest steps that take so many samples; ``each`` as of :meth:`microbatches`."""
        consumed = steps = 0
        for (_, size), (end, _) in pairwise((*self.sizes, (samples, 0))):
            taken = size - size % each
            count = max(0, -(-(min(end, samples) - consumed) // taken))
            consumed += count * taken
            steps += count
        return steps

    def samples(self, steps: int) -> int:
        """How many the first ``steps`` steps take; one that has begun is finished."""
        consumed = 0
        for (_, size), (end, _) in pairwise(self.sizes):
            taken = min(steps, max(0, -(-(end - consumed) // size)))
            consumed += taken * size
            steps -= taken
        return consumed + steps * self.largest
