"""Which replica encodes what of a step's units, by what media cost. Pure; the same everywhere.

Nothing here measures: costs are counted from the images' grids, which every rank of a model
replica knows from the text part, so that all ranks come to the same plan without a word.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate
from typing import Self

from loongplug.data.microbatch import Share
from loongplug.data.positions import Grid
from loongplug.hetero.pieces import runs
from loongplug.models.architecture import EncoderArchitecture

THRESHOLD = 0.2

# Units are not cut where the slowest replica is above the mean by less than a tenth.
_EVEN = 10
# Units are cut no finer than it takes: in pieces of at most the mean load, then of a half, ...
_FINENESS = (1, 2, 4, 8, 16)

# The local improvement is bounded: it changes at most so many pairs of replicas, looks at so many
# partners of the slowest one (at more until it finds one), and at so many units of it.
_CHANGES, _PARTNERS, _CANDIDATES = 64, 8, 16
# The slowest is good enough when it is within this part of the mean.
_CLOSE = 1000

_Held = list[list[tuple[int, int]]]  # by replica: cost and place of its units, ascending


@dataclass(frozen=True, kw_only=True)
class EncoderMacs:
    """Multiplications and additions of an encoder's forward; its backward is twice as much.

    A row, such as a patch, takes ``linear`` in projections and MLPs. In attention each row of a
    frame meets each other of its window: ``attention`` has, by the window's side in rows (None: the
    whole frame), what one such pair takes in all layers with that window. What is before and
    behind the layers, a few percent, is left out.
    """

    linear: int
    attention: tuple[tuple[int | None, int], ...]
    blank: Grid  # of the smallest medium

    @classmethod
    def of(cls, encoder: EncoderArchitecture) -> Self:
        """Counted from the sizes of its layers."""
        hidden, ffn = encoder.hidden_size, encoder.ffn_hidden_size
        layer = 4 * hidden * hidden + encoder.mlp_matrices * hidden * ffn
        windows, rows = encoder.attention_windows(), encoder.rows_per_state
        return cls(
            linear=encoder.computed_layers * layer // rows,
            attention=tuple(
                (side, layers * 2 * hidden // rows**2) for side, layers in windows.items()
            ),
            blank=encoder.blank_grid(),
        )

    def of_units(self, units: Sequence[Sequence[Grid]]) -> list[int]:
        """Each unit's; without media it is encoded as the smallest there is.

        A size of frame is counted once: the images of a step share few sizes.
        """
        smallest = (self.blank,)
        sizes = {grid[1:] for grids in units for grid in grids} | {smallest[0][1:]}
        of_frame = {size: self._of_frame(*size) for size in sizes}
        return [
            sum([time * of_frame[height, width] for time, height, width in grids or smallest])
            for grids in units
        ]

    def _of_frame(self, height: int, width: int) -> int:
        pairs = sum(
            weight * _pairs(height, side) * _pairs(width, side) for side, weight in self.attention
        )
        return self.linear * height * width + pairs


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Assigns by cost where assigning in turn leaves the replicas unevenly loaded.

    That is where the slowest has at least (1 + ``threshold``) times the mean. Where whole units
    leave it so, too, and by more than a tenth, units are cut: each share is one more pass
    through the encoder with fewer rows to it, so a smaller gain is not worth it. ``tokens`` has a
    medium's in the text.
    """

    work: EncoderMacs
    tokens: Callable[[Grid], int]
    threshold: float = THRESHOLD

    @classmethod
    def of(cls, encoder: EncoderArchitecture, *, threshold: float = THRESHOLD) -> Self:
        """For an encoder's media."""
        return cls(work=EncoderMacs.of(encoder), tokens=encoder.tokens, threshold=threshold)

    def assign(
        self, units: Sequence[Sequence[Grid]], *, replicas: int
    ) -> tuple[tuple[Share, ...], ...]:
        """The shares of each unit of a step, given as the grids of its media.

        The shares of a unit are in the order of the first medium in each.
        """
        costs = self.work.of_units(units)
        whole = plan(costs, replicas, self.threshold)
        found: tuple[tuple[Share, ...], ...]
        found = tuple((Share(encoder_replica=each),) for each in whole)
        if imbalance(costs, whole, replicas=replicas) < max(self.threshold, 1 / _EVEN):
            return found
        slowest, total = max(loads(costs, whole, replicas=replicas)), sum(costs)
        media = [self.work.of_units([[grid] for grid in grids]) for grids in units]
        # Nothing does better than a replica with the largest medium alone.
        largest = max(max(each, default=cost) for each, cost in zip(media, costs, strict=True))
        best = max(total, largest * replicas)
        for fineness in _FINENESS:
            if slowest * replicas * _EVEN <= best * (_EVEN + 1):
                break
            pieces = _pieces(media, total // (replicas * fineness))
            of_pieces = [
                sum(media[unit][piece.start : piece.stop]) if piece else costs[unit]
                for unit, piece in pieces
            ]
            owners = balanced(of_pieces, replicas)
            now = max(loads(of_pieces, owners, replicas=replicas))
            if now < slowest:
                slowest, found = now, self._shares(units, pieces, owners)
        return found

    def _shares(
        self,
        units: Sequence[Sequence[Grid]],
        pieces: Sequence[tuple[int, range]],
        owners: Sequence[int],
    ) -> tuple[tuple[Share, ...], ...]:
        """Of each unit, a share for each replica that has pieces of it."""
        held: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in units]
        for (unit, piece), owner in zip(pieces, owners, strict=True):
            held[unit][owner] += piece
        return tuple(
            shares_of(of_unit, tokens=list(map(self.tokens, grids)))
            for grids, of_unit in zip(units, held, strict=True)
        )


def shares_of(held: Mapping[int, Sequence[int]], *, tokens: Sequence[int]) -> tuple[Share, ...]:
    """Of a unit whose media have so many ``tokens``; ``held``: media of each replica, ascending."""
    if len(held) == 1:
        return tuple(Share(encoder_replica=each) for each in held)
    ends = list(accumulate(tokens, initial=0))
    return tuple(
        Share(encoder_replica=each, media=tuple(media), rows=_rows(media, ends))
        for each, media in held.items()
    )


def _pieces(media: Sequence[Sequence[int]], largest: int) -> list[tuple[int, range]]:
    """Of each unit, whose media cost so much, the pieces in order, none of them empty but one of
    a unit without media."""
    return [
        (unit, piece)
        for unit, costs in enumerate(media)
        for piece in runs(costs, largest) or (range(0),)
    ]


def _rows(media: Sequence[int], ends: Sequence[int]) -> tuple[slice, ...]:
    """Of these media, a slice for neighbours together; ``ends`` are those of all, from 0 on."""
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
    found = balanced(costs, replicas)
    better = max(loads(costs, found, replicas=replicas)) < max(
        loads(costs, in_turn, replicas=replicas)
    )
    return found if better else in_turn


def loads(costs: Sequence[int], encoder_replicas: Sequence[int], *, replicas: int) -> list[int]:
    """What each replica has to do."""
    of_replica = [0] * replicas
    for cost, encoder_replica in zip(costs, encoder_replicas, strict=True):
        of_replica[encoder_replica] += cost
    return of_replica


def imbalance(costs: Sequence[int], encoder_replicas: Sequence[int], *, replicas: int) -> float:
    """By what part of the mean the slowest replica is above it; 0 where there is no work."""
    total = sum(costs)
    slowest = max(loads(costs, encoder_replicas, replicas=replicas))
    return slowest * replicas / total - 1 if total else 0.0


def balanced(costs: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Longest first, each to the least loaded replica; then improved by moves and swaps.

    Units count by their place in the order of costs, so that the loads do not depend on the
    order the units come in; of equal ones, the earlier is placed first.
    """
    order = sorted(range(len(costs)), key=lambda unit: (-costs[unit], unit))
    ladder, held = _longest_first([costs[unit] for unit in order], replicas)
    _improve(ladder, held)
    encoder_replicas = [0] * len(costs)
    for replica, units in enumerate(held):
        for _, place in units:
            encoder_replicas[order[place]] = replica
    return tuple(encoder_replicas)


def _longest_first(costs: Sequence[int], replicas: int) -> tuple[list[tuple[int, int]], _Held]:
    """Loads with their replicas, ascending, and what each replica has; ``costs`` descend."""
    ladder = [(0, replica) for replica in range(replicas)]  # a heap
    held: _Held = [[] for _ in range(replicas)]
    for place, cost in enumerate(costs):
        load, replica = ladder[0]
        held[replica].append((cost, place))
        heapreplace(ladder, (load + cost, replica))
    for units in held:
        units.sort()
    return sorted(ladder), held


def _improve(ladder: list[tuple[int, int]], held: _Held) -> None:
    """Let the slowest replica give a unit away, or swap it for a smaller one, as long as the
    slower of the two is faster afterwards."""
    total = sum(load for load, _ in ladder)
    for _ in range(_CHANGES):
        top, slowest = ladder[-1]
        if top * len(ladder) * _CLOSE <= total * (_CLOSE + 1) or len(held[slowest]) == 1:
            return
        best: tuple[int, int, tuple[int, int], tuple[int, int] | None] | None = None
        for rung, (load, other) in enumerate(ladder[:-1]):
            if rung >= _PARTNERS and best is not None:
                break
            change = _exchange(held[slowest], held[other], gap=top - load)
            if change is not None:
                less, out, back = change
                slower = max(top - less, load + less)
                if best is None or slower < best[0]:
                    best = slower, rung, out, back
        if best is None:
            return
        _, rung, out, back = best
        load, other = ladder.pop(rung)
        ladder.pop()
        less = out[0] - (back[0] if back else 0)
        _give(out, held[slowest], held[other])
        if back is not None:
            _give(back, held[other], held[slowest])
        insort(ladder, (top - less, slowest))
        insort(ladder, (load + less, other))


def _exchange(
    mine: list[tuple[int, int]], others: list[tuple[int, int]], *, gap: int
) -> tuple[int, tuple[int, int], tuple[int, int] | None] | None:
    """By how much, what goes and what comes back so that two loads that are ``gap`` apart come
    closest; None where nothing brings them closer."""
    best = None
    for out in mine[:: -(-len(mine) // _CANDIDATES)]:
        at = bisect_left(others, (out[0] - gap // 2,))
        back: tuple[int, int] | None
        for back in (None, *others[max(at - 1, 0) : at + 1]):
            less = out[0] - (back[0] if back else 0)
            apart = abs(gap - 2 * less)
            if apart < gap and (best is None or apart < best[0]):
                best = apart, less, out, back
    return None if best is None else best[1:]


def _give(
    unit: tuple[int, int], giver: list[tuple[int, int]], taker: list[tuple[int, int]]
) -> None:
    giver.remove(unit)
    insort(taker, unit)


def _pairs(length: int, side: int | None) -> int:
    """Pairs of places along one axis that share a window; over two axes they multiply."""
    if side is None:
        return length * length
    whole, rest = divmod(length, side)
    return whole * side * side + rest * rest
