"""Who sends which of a piece's rows to whom, and gradients back. Pure; every rank knows all.

With context parallelism, each rank of a row holds a part of it, and with sequence parallelism, rank
t of a tensor parallel group of n holds the t-th of n equal chunks of that. So it needs only the
features of the visual tokens that lie there.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loongplug.context.token_split import TokenSplit
from loongplug.data.microbatch import Share
from loongplug.hetero.placement import Edge

Rows = tuple[slice, ...]  # of a unit's features, ascending, without overlap

_TOGETHER = 16  # units that go over at a time, unless more replicas have one each


class RowMove(NamedTuple):
    """Rows of a piece that go from one rank to another, or stay on one.

    ``given`` are their places in what the source has of the piece, ``placed`` those in what the
    target gets of it, each row of which comes in one move.
    """

    piece: int
    source: int
    target: int
    given: Rows
    placed: Rows

    @classmethod
    def of(cls, piece: int, source: int, target: int, *, has: Rows, wants: Rows) -> "RowMove":
        """The move of rows that the source has and the target wants."""
        rows = common(has, wants)
        return cls(piece, source, target, within(rows, has), within(rows, wants))

    @property
    def back(self) -> "RowMove":
        return RowMove(self.piece, self.target, self.source, self.placed, self.given)


@dataclass(frozen=True, kw_only=True)
class ExchangeSpec:
    """What every rank of a model replica knows of the units that travel together.

    ``tokens`` and ``shares`` by unit; a payload is [rows of the share, width] of ``dtype``.
    ``shards`` are, by unit, the rows of each part of the sequence, of which consumers need one;
    None where each needs all.
    ``row_tokens`` are, by unit, the tokens of each row of its microbatch.
    """

    tokens: tuple[int, ...]
    shares: tuple[tuple[Share, ...], ...]
    width: int
    dtype: torch.dtype
    shards: tuple[tuple[Rows, ...], ...] | None = None
    row_tokens: tuple[tuple[int, ...], ...] = ()

    def part(self, units: range) -> "ExchangeSpec":
        """The same of some units alone, which are given by their places here."""
        some = slice(units.start, units.stop)
        return replace(
            self,
            tokens=self.tokens[some],
            shares=self.shares[some],
            shards=None if self.shards is None else self.shards[some],
            row_tokens=self.row_tokens[some],
        )

    def lots(self, units: range) -> Iterator[range]:
        """These units, as many at a time as go over together; the same on every rank.

        What has come is copied out of what it came in, so that it is there twice for a moment.
        """
        replicas = {each for own in self.encoder_replicas[units.start : units.stop] for each in own}
        most = max(_TOGETHER, len(replicas))
        for start in range(units.start, units.stop, most):
            yield range(start, min(start + most, units.stop))

    @property
    def parts(self) -> int:
        """How many there are of each sequence."""
        return len(self.shards[0]) if self.shards else 1

    @property
    def encoder_replicas(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(each.encoder_replica for each in shares) for shares in self.shares)

    def of_parts(self, unit: int) -> tuple[Rows, ...]:
        """The rows that each part of the sequence needs of a unit."""
        return (self._all(unit),) if self.shards is None else self.shards[unit]

    def encoded(self) -> Iterator[tuple[int, int, Rows]]:
        for unit, shares in enumerate(self.shares):
            for each in shares:
                rows = self._all(unit) if each.rows is None else each.rows
                yield unit, each.encoder_replica, rows

    def _all(self, unit: int) -> Rows:
        return (slice(0, self.tokens[unit]),)


def feature_moves(edge: Edge, units: ExchangeSpec, *, rank: int) -> Iterator[RowMove]:
    """The moves of shares to every consumer that ``rank`` is in.

    All ranks of a replica have the whole features of its share; a consumer that is of the replica
    keeps its own, and the others are served in turn by all ranks of the replica. Each consumer gets
    only the rows of its own part of the sequence.
    """
    consumers = [(n, each) for n, ranks in enumerate(edge.parts(units.parts)) for each in ranks]
    for unit, encoder_replica, has in units.encoded():
        replica, wants = edge.replicas[encoder_replica], units.of_parts(unit)
        for index, (part, consumer) in enumerate(consumers):
            source = consumer if consumer in replica else replica[index % len(replica)]
            if rank in (source, consumer):
                yield RowMove.of(unit, source, consumer, has=has, wants=wants[part])


def gradient_moves(edge: Edge, units: ExchangeSpec, *, rank: int) -> Iterator[RowMove]:
    """The moves of shares' gradients to every rank of the replica that made each.

    Those that ``rank`` is in. All consumers of a part of the sequence have the whole gradient of
    its rows, and one of each part sends it, in turn.
    """
    for unit, encoder_replica, wants in units.encoded():
        replica = edge.replicas[encoder_replica]
        for index, target in enumerate(replica):
            turn = encoder_replica * len(replica) + index
            for ranks, has in zip(edge.parts(units.parts), units.of_parts(unit), strict=True):
                source = target if target in ranks else ranks[turn % len(ranks)]
                if rank in (source, target):
                    yield RowMove.of(unit, source, target, has=has, wants=wants)


def sequence_shards(
    places: Sequence[NDArray[np.int64]], *, split: TokenSplit, tp: int = 1
) -> tuple[Rows, ...]:
    """The rows that each part of the sequence needs: those of ``split``, each in ``tp`` chunks.

    Neighbours are chunks of one part. A slice is of one row of the microbatch, and of one stretch
    of its tokens. ``places`` are where each row's visual tokens lie, ascending.
    """
    shards = []
    for held in (chunk for part in split.parts for chunk in part.chunks(tp)):
        shard, start = [], 0
        for row in places:
            firsts = (start + np.searchsorted(row, held.starts)).tolist()
            behinds = (start + np.searchsorted(row, held.stops)).tolist()
            pairs = zip(firsts, behinds, strict=True)
            shard += [slice(first, behind) for first, behind in pairs if behind > first]
            start += len(row)
        shards.append(tuple(shard))
    return tuple(shards)


def common(rows: Rows, others: Rows) -> Rows:
    """The rows that both have; each slice lies within one of ``rows`` and one of ``others``."""
    found, left = [], deque(others)
    for each in rows:
        while left and left[0].start < each.stop:
            first, behind = max(each.start, left[0].start), min(each.stop, left[0].stop)
            if behind > first:
                found.append(slice(first, behind))
            if left[0].stop > each.stop:  # there may be more of it in the next one
                break
            left.popleft()
    return tuple(found)


def joined(several: Iterable[Rows]) -> Rows:
    """All rows of several that have none in common; neighbours are one slice."""
    found: list[slice] = []
    for each in sorted(chain.from_iterable(several), key=lambda each: (each.start, each.stop)):
        first = found.pop().start if found and found[-1].stop == each.start else each.start
        found.append(slice(first, each.stop))
    return tuple(found)


def within(rows: Rows, whole: Rows) -> Rows:
    """Where ``rows`` lie when those of ``whole`` are put side by side; neighbours are one slice.

    Each slice of ``rows`` lies within one of ``whole``.
    """
    found, left, start = [], deque(rows), 0
    for each in whole:
        by = start - each.start
        while left and left[0].start < each.stop:
            part = left.popleft()
            found.append(slice(part.start + by, part.stop + by))
        start += each.stop - each.start
    return joined([tuple(found)])


def size(rows: Rows) -> int:
    return sum(each.stop - each.start for each in rows)
