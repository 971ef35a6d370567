"""Packs that are planned from an index of lengths, so that a rank makes its own samples alone."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from loongplug.data.dataset import ChatDataset, Sample
from loongplug.data.order import SampleOrder
from loongplug.data.packing import Pack, PackingState, PackPlanner
from loongplug.data.text_stream import START, ResumePoint
from loongplug.data.workers import Background, WorkerSettings


class PlannedPacks:
    """The packs of the endless stream of samples, of all ranks, one after the other.

    They are those that planning from the samples themselves gives. No collectives.
    """

    def __init__(
        self,
        lengths: NDArray[np.int32],
        order: SampleOrder,
        *,
        seq_length: int,
        look_ahead: int,
        place: ResumePoint = START,
    ) -> None:
        """``lengths``: tokens of each sample, by index. Goes on from ``place``.

        Of samples that are held back there, the lengths are taken from the index as well: it may
        have been made again since.
        """
        self._lengths = lengths
        self._order = order
        positions = [position for position, _ in place.state.held]
        held = zip(positions, self._lengths_at(positions), strict=True)
        self._planner = PackPlanner(
            seq_length=seq_length,
            look_ahead=look_ahead,
            state=PackingState(read=place.state.read, held=tuple(held)),
        )
        self.given = place.packs  # so far

    @property
    def place(self) -> ResumePoint:
        """Where the next pack begins."""
        return ResumePoint(self.given, self._planner.state)

    def next(self) -> Pack:
        """The positions of the next pack's samples."""
        while (pack := self._planner.next_pack()) is None:
            self._planner.add(*self._lengths_at([self._planner.read]))
        self.given += 1
        return pack

    def _lengths_at(self, positions: list[int]) -> list[int]:
        return [int(self._lengths[index]) for index in self._order.indices(positions)]


def packs_of_epochs(
    lengths: NDArray[np.int32], *, seed: int, seq_length: int, look_ahead: int, epochs: int
) -> int:
    """How many packs of the stream hold all samples of its first epochs.

    The last of them may be filled up with samples of the next epoch.
    """
    order = SampleOrder(len(lengths), seed=seed)
    packs = PlannedPacks(lengths, order, seq_length=seq_length, look_ahead=look_ahead)
    while packs.next()[0] < epochs * len(lengths):  # a pack's first sample has waited longest
        pass
    return packs.given - 1


@dataclass(frozen=True)
class _OwnPack:
    begins: ResumePoint
    lengths: tuple[int, ...]  # by the index


class OwnPacks(Iterator[list[Sample]]):
    """The samples of one of this rank's packs after the other; a microbatch is a pack.

    As :class:`~loongplug.data.text_stream.PackedTexts`, with the same packs and places; but of
    samples in packs of other ranks nothing is read.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        *,
        lengths: NDArray[np.int32],
        look_ahead: int,
        dp_rank: int,
        dp_size: int,
        seed: int | None,
        consumed_packs: int,
        resume: ResumePoint | None,
        workers: WorkerSettings,
    ) -> None:
        """``lengths``: tokens of each sample; the others as of ``PackedTexts``."""
        self._lengths = lengths
        self._seq_length = dataset.seq_length
        self._look_ahead = look_ahead
        self._order = SampleOrder(len(dataset), seed=seed)
        # All ranks take one pack each at a time.
        self._firsts, self._dp_rank = count(consumed_packs, dp_size), dp_rank
        # Processes are given packs ahead of their use, so each has to bring its place with it.
        self._ahead: deque[_OwnPack] = deque()
        self._parts = Background(dataset.text_parts, self._own(resume or START), settings=workers)

    def __next__(self) -> list[Sample]:
        """The samples of this rank's next pack.

        Raises:
            ValueError: one is not as long as the index has it.
        """
        samples = next(self._parts)
        pack = self._ahead.popleft()
        self.before = pack.begins
        for sample, length in zip(samples, pack.lengths, strict=True):
            # One that cannot be used any more leaves its room empty.
            if sample.bad is None and len(sample) != length:
                raise ValueError(
                    f"{sample.where}: the sample has {len(sample)} tokens, but {length} by the"
                    " index of lengths (0: it could not be used): its images or videos, or what"
                    " reads them, have changed since. Make the index again with"
                    " `loongplug data index`, or remove it."
                )
        return samples

    def close(self) -> None:
        """End the background processes."""
        self._parts.close()

    def _own(self, place: ResumePoint) -> Iterator[list[int]]:
        """The samples of this rank's packs, by index."""
        packs = PlannedPacks(
            self._lengths,
            self._order,
            seq_length=self._seq_length,
            look_ahead=self._look_ahead,
            place=place,
        )
        for first in self._firsts:
            while packs.given < first:
                packs.next()
            begins = packs.place
            while packs.given < first + self._dp_rank:
                packs.next()
            indices = self._order.indices(packs.next())
            lengths = tuple(int(self._lengths[index]) for index in indices)
            self._ahead.append(_OwnPack(begins, lengths))
            yield indices
