"""Which replica encodes what of a step's units, by what media cost, and in which passes. Pure.

Nothing here measures: costs are counted from the images' grids, which every rank of a model
replica knows from the text part, so that all ranks come to the same plan without a word.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate
from typing import Self

from loongplug.data.microbatch import Share
from loongplug.data.sample import Grid
from loongplug.models.amounts import frame_macs
from loongplug.models.architecture import EncoderArchitecture

THRESHOLD = 0.2

# Units are not cut where the slowest replica is above the mean by less than a tenth.
_EVEN = 10
# Units are cut no finer than it takes: in pieces of at most the mean load, then of a half, ...
_FINENESS = (1, 2, 4, 8, 16)

# The local improvement is bounded: so many changes, for each of which it looks at so many units of
# the slowest replica.
_CHANGES, _CANDIDATES = 32, 16

_Unit = tuple[int, int]  # its cost and its place
_NOTHING: _Unit = (0, -1)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Assigns by cost where assigning in turn leaves the replicas unevenly loaded.

    That is where the slowest has at least (1 + ``threshold``) times the mean. Where whole units
    leave it so by more than a tenth, units are cut: each share is one more pass. ``of_frame`` has
    what a frame of height x width rows costs, ``tokens`` a medium's in the text. A unit without
    media is encoded as one of the size ``blank``.
    """

    of_frame: Callable[[int, int], int]
    blank: Grid
    tokens: Callable[[Grid], int]
    threshold: float = THRESHOLD

    @classmethod
    def of(cls, encoder: EncoderArchitecture, *, threshold: float = THRESHOLD) -> Self:
        return cls(
            of_frame=frame_macs(encoder),
            blank=encoder.blank_grid(),
            tokens=encoder.tokens,
            threshold=threshold,
        )

    def costs(self, units: Sequence[Sequence[Grid]]) -> list[int]:
        of_frame, blank = self.of_frame, (self.blank,)
        return [sum([t * of_frame(h, w) for t, h, w in grids or blank]) for grids in units]

    def assign(
        self, units: Sequence[Sequence[Grid]], *, replicas: int
    ) -> tuple[tuple[Share, ...], ...]:
        """The shares of each unit of a step, given as the grids of its media.

        The shares of a unit are in the order of the first medium in each.
        """
        costs = self.costs(units)
        whole = plan(costs, replicas, self.threshold)
        found: tuple[tuple[Share, ...], ...] = tuple((Share(encoder_replica=x),) for x in whole)
        if imbalance(costs, whole, replicas=replicas) < max(self.threshold, 1 / _EVEN):
            return found
        slowest, total = max(loads(costs, whole, replicas=replicas)), sum(costs)
        # A unit without media is a piece, too.
        media = [self.costs([[grid] for grid in grids or (self.blank,)]) for grids in units]
        # Nothing does better than a replica with the largest medium alone.
        best = max(total, replicas * max(map(max, media)))
        for fineness in _FINENESS:
            if slowest * replicas * _EVEN <= best * (_EVEN + 1):
                break
            most = total // (replicas * fineness)
            pieces = [
                (unit, piece) for unit, each in enumerate(media) for piece in runs(each, most)
            ]
            of_pieces = [sum(media[unit][piece.start : piece.stop]) for unit, piece in pieces]
            owners = balanced(of_pieces, replicas)
            now = max(loads(of_pieces, owners, replicas=replicas))
            if now < slowest:
                tokens = [list(map(self.tokens, grids)) for grids in units]
                owned = ((*each, owner) for each, owner in zip(pieces, owners, strict=True))
                slowest, found = now, shares_of(owned, tokens=tokens)
        return found


def shares_of(
    pieces: Iterable[tuple[int, Sequence[int], int]], *, tokens: Sequence[Sequence[int]]
) -> tuple[tuple[Share, ...], ...]:
    """The shares of each unit, whose media have so many ``tokens``: one for each owner of pieces.

    A piece is the unit's number, media of it, ascending, and the replica that encodes them. Of a
    unit without a piece somebody has a share nevertheless, with nothing to do.
    """
    held: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in tokens]
    for unit, media, owner in pieces:
        held[unit][owner] += media
    found: list[tuple[Share, ...]] = []
    for of_unit, counts in zip(held, tokens, strict=True):
        if len(of_unit) > 1:
            ends = list(accumulate(counts, initial=0))
            several = (
                Share(encoder_replica=each, media=tuple(media), rows=_rows(media, ends))
                for each, media in of_unit.items()
            )
            found.append(tuple(several))
        else:
            found.append(tuple(Share(encoder_replica=each) for each in of_unit or (0,)))
    return tuple(found)


def cut(costs: Sequence[int], count: int) -> tuple[range, ...]:
    """Media of these costs in ``count`` pieces, or one each where there are fewer media.

    The largest piece is as small as can be. Pieces are in order, none is empty, and each medium, by
    its number, is in one of them. Without media there is none.

    >>> cut([1, 1, 1, 5, 1, 1], 3)
    (range(0, 3), range(3, 4), range(4, 6))
    """
    assert count > 0, count
    least, most = max([-(-sum(costs) // count), *costs]), sum(costs)
    while least < most:
        middle = (least + most) // 2
        if len(runs(costs, middle)) <= count:
            most = middle
        else:
            least = middle + 1
    found = runs(costs, most)
    while len(found) < min(count, len(costs)):
        # Smaller ones are easier to balance.
        largest = max(
            (place for place, run in enumerate(found) if len(run) > 1),
            key=lambda place: sum(costs[found[place].start : found[place].stop]),
        )
        found[largest : largest + 1] = _halves(costs, found[largest])
    return tuple(found)


def runs(costs: Sequence[int], largest: int) -> list[range]:
    """As few runs of neighbours as there can be of at most so much, or of one that costs anything.

    >>> runs([60, 0, 60, 40], 100)
    [range(0, 2), range(2, 4)]
    """
    found: list[range] = []
    held = 0  # by the last one
    for number, cost in enumerate(costs):
        if found and (0 in (cost, held) or held + cost <= largest):
            found[-1] = range(found[-1].start, number + 1)
            held += cost
        else:
            found.append(range(number, number + 1))
            held = cost
    return found


def in_passes[Piece](
    pieces: Sequence[Piece], costs: Sequence[int], *, most: int | None
) -> list[tuple[Piece, ...]]:
    """The passes of a replica's ``pieces`` through the encoder.

    A pass costs ``most`` at most, or has one piece that costs anything; None: one each.
    """
    if most is None:
        return [(each,) for each in pieces]
    return [tuple(pieces[run.start : run.stop]) for run in runs(costs, most)]


def _halves(costs: Sequence[int], run: range) -> tuple[range, range]:
    """Two parts of a run of several media, as even as can be."""
    first = list(accumulate(costs[run.start : run.stop]))
    middle = min(run[1:], key=lambda at: abs(first[-1] - 2 * first[at - run.start - 1]))
    return range(run.start, middle), range(middle, run.stop)


def _rows(media: Sequence[int], ends: Sequence[int]) -> tuple[slice, ...]:
    """The rows of these media, neighbours as one slice; ``ends`` are those of all, from 0 on."""
    found: list[slice] = []
    for number in media:
        first, behind = ends[number], ends[number + 1]
        if found and found[-1].stop == first:
            first = found.pop().start
        found.append(slice(first, behind))
    return tuple(found)


def plan(costs: Sequence[int], replicas: int, threshold: float = THRESHOLD) -> tuple[int, ...]:
    """The replica of each unit: in turn, or balanced where that is called for and is better."""
    in_turn = tuple(unit % replicas for unit in range(len(costs)))
    if imbalance(costs, in_turn, replicas=replicas) < threshold:
        return in_turn
    both = in_turn, balanced(costs, replicas)
    return min(both, key=lambda each: max(loads(costs, each, replicas=replicas)))


def loads(costs: Sequence[int], encoder_replicas: Sequence[int], *, replicas: int) -> list[int]:
    of_replica = [0] * replicas
    for cost, encoder_replica in zip(costs, encoder_replicas, strict=True):
        of_replica[encoder_replica] += cost
    return of_replica


def imbalance(costs: Sequence[int], encoder_replicas: Sequence[int], *, replicas: int) -> float:
    """The part of the mean by which the slowest replica is above it; 0 where there is no work."""
    total = sum(costs)
    slowest = max(loads(costs, encoder_replicas, replicas=replicas))
    return slowest * replicas / total - 1 if total else 0.0


def balanced(costs: Sequence[int], replicas: int) -> tuple[int, ...]:
    """The replica of each unit: longest first to the least loaded; then moves and swaps.

    The slowest gives a unit away, perhaps for a smaller one, to the least loaded with which the
    slower of the two is faster afterwards. Loads do not depend on the order the units come in.
    """
    order = sorted(range(len(costs)), key=lambda unit: (-costs[unit], unit))
    least = [(0, replica) for replica in range(replicas)]  # a heap of loads, and whose they are
    held: list[list[_Unit]] = [[] for _ in least]
    for place, unit in enumerate(order):
        load, replica = least[0]
        held[replica].append((costs[unit], place))
        heapreplace(least, (load + costs[unit], replica))
    held = [sorted(each) for each in held]
    for _ in range(_CHANGES):
        *others, (top, slowest) = sorted(
            (sum(cost for cost, _ in x), at) for at, x in enumerate(held)
        )
        for load, other in others if len(held[slowest]) > 1 else ():
            less, out, back = _exchange(held[slowest], held[other], gap=top - load)
            if abs(top - load - 2 * less) < top - load:
                break
        else:
            break
        held[slowest] = sorted({*held[slowest], back} - {out, _NOTHING})
        held[other] = sorted({*held[other], out} - {back})
    encoder_replicas = [0] * len(costs)
    for replica, units in enumerate(held):
        for _, place in units:
            encoder_replicas[order[place]] = replica
    return tuple(encoder_replicas)


def _exchange(
    mine: Sequence[_Unit], others: Sequence[_Unit], *, gap: int
) -> tuple[int, _Unit, _Unit]:
    """The exchange by which loads ``gap`` apart come closest: its gain, what goes, what comes."""
    found = []
    for out in mine[:: -(-len(mine) // _CANDIDATES)]:
        at = bisect_left(others, (out[0] - gap // 2,))
        for back in (_NOTHING, *others[max(at - 1, 0) : at + 1]):
            found.append((out[0] - back[0], out, back))
    return min(found, key=lambda each: abs(gap - 2 * each[0]))
