"""The ways of pieces that are sent one by one, between modules, stages and ranks. Pure.

In each context part of a sequence, a replica's piece goes to one rank of the tensor parallel group
(:meth:`~loongplug.hetero.placement.Edge.meetings`), with all rows of that part; what a rank of the
first stage has encoded itself it keeps, with those of all parts. A group of these ranks then deals
the rows of a microbatch (:class:`Deal`). So each row crosses once, and so does its gradient. All
ranks at an edge know all pieces, and send and take them in one order.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, batched, chain, cycle, pairwise

import torch

from loongplug.hetero.bubble_planner import Piece
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import ApartPiece, Edge, Pair
from loongplug.hetero.row_moves import ExchangeSpec, RowMove, Rows, common, joined, size, within
from loongplug.hetero.wire import StepMoves
from loongplug.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Deal:
    """The rows of a microbatch that each of some ranks ``holds``, and those that it ``needs``.

    Each row is held once, and needed by as many as each other one. ``ranks`` are those of the
    group, in its order: a tensor parallel one of the decoder's, or that of all context parts, too.
    """

    ranks: tuple[int, ...]
    holds: tuple[Rows, ...]
    needs: tuple[Rows, ...]

    @property
    def rows(self) -> int:
        return sum(map(size, self.holds))

    @property
    def copies(self) -> int:
        """How many ranks, neighbours, need each row."""
        return sum(map(size, self.needs)) // max(1, self.rows)

    def there(self, rank: int) -> Iterator[RowMove]:
        """The moves that ``rank`` is in, as those of piece 0."""
        for source, has in zip(self.ranks, self.holds, strict=True):
            for target, wants in zip(self.ranks, self.needs, strict=True):
                if rank in (source, target):
                    yield RowMove.of(0, source, target, has=has, wants=wants)

    def back(self, rank: int) -> Iterator[RowMove]:
        """The moves of the gradient: each row from one of its copies, the own one if there is."""
        copies = self.copies
        for number, (target, wants) in enumerate(zip(self.ranks, self.holds, strict=True)):
            for place in range(number % copies, len(self.ranks), copies):
                source, has = self.ranks[place], self.needs[place]
                if rank in (source, target):
                    yield RowMove.of(0, source, target, has=has, wants=wants)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The ``rows`` of a ``unit`` that one encoder replica makes, and their way to the decoder.

    ``piece`` is their number in the plan, and may have several. ``meetings`` are by context part,
    or one for all parts. ``microbatch`` is the one by which sends are bounded, if they are.
    """

    piece: int
    unit: int
    rows: slice
    meetings: tuple[Pair, ...]
    microbatch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """The crossings of a step that one ``rank`` knows of, in order, and what it knows of ``units``.

    ``groups`` are the consumers in its model replica, as they deal among themselves; none on ranks
    that are of no decoder.
    """

    units: ExchangeSpec
    every: tuple[Crossing, ...]
    groups: tuple[tuple[int, ...], ...]
    rank: int

    def of_step(self, what: Cargo) -> StepMoves:
        found = defaultdict[int, list[RowMove]](list)
        for each in self.every:
            moves = found[each.piece]
            for part, (source, target) in enumerate(each.meetings):
                if self.rank not in (source, target):
                    continue
                rows = self._rows(each, part)
                start = sum(size(move.placed) for move in moves if move.target == target)
                placed = (slice(start, start + size(rows)),)
                given = within(rows, (each.rows,))
                moves.append(RowMove(each.piece, source, target, given, placed))
        return StepMoves(
            moves={
                piece: [move.back for move in moves] if what.back else moves
                for piece, moves in found.items()
            },
            microbatches={
                each.piece: each.microbatch for each in self.every if each.microbatch is not None
            },
            width=self.units.width,
            dtype=self.units.dtype,
        )

    def deal(self, unit: int) -> Deal:
        """How the rank's group deals what has come of a unit."""
        ranks = next(each for each in self.groups if self.rank in each)
        parts, consumers = self.units.of_parts(unit), [*chain(*self.groups)]
        copies = len(consumers) // len(parts)  # ranks that need the same rows
        first = consumers.index(ranks[0]) // copies
        needed = parts[first : first + len(ranks) // copies]
        whole = joined(needed)
        held: dict[int, list[Rows]] = {rank: [] for rank in ranks}
        for each in (every for every in self.every if every.unit == unit):
            for part, (_, target) in enumerate(each.meetings):
                if target in held:
                    held[target].append(common(whole, self._rows(each, part)))
        return Deal(
            ranks=ranks,
            holds=tuple(within(joined(rows), whole) for rows in held.values()),
            needs=tuple(within(rows, whole) for rows in needed for _ in range(copies)),
        )

    def _rows(self, crossing: Crossing, part: int) -> Rows:
        """The rows that go to who is met of this part; to one for all parts, all."""
        own, number = (crossing.rows,), len(crossing.meetings)
        if number == 1:
            return own
        return common(_context_parts(self.units.of_parts(crossing.unit), number)[part], own)


@lru_cache(maxsize=1024)
def _context_parts(chunks: tuple[Rows, ...], number: int) -> tuple[Rows, ...]:
    """The rows of each of so many context parts, of those of each one's chunks."""
    return tuple(map(joined, batched(chunks, len(chunks) // number)))


def streamed_crossings(
    pieces: Sequence[Piece], units: ExchangeSpec, *, edge: Edge, cp: int, rank: int
) -> Crossings:
    """The crossings of a step that streams, which all ranks of a model replica know."""
    return Crossings(
        units=units,
        every=tuple(
            Crossing(
                piece=number,
                unit=each.microbatch,
                rows=each.rows,
                meetings=edge.meetings(each.replica, cp=cp),
            )
            for number, each in enumerate(pieces)
        ),
        groups=(edge.consumers,),
        rank=rank,
    )


def apart_crossings(
    pieces: Sequence[ApartPiece], units: ExchangeSpec, *, cp: int, rank: int
) -> Crossings:
    """The crossings of an encoder on ranks of its own; ``pieces`` are those of one microbatch.

    On the encoder's ranks, a unit of a step is what one replica makes of one decoder replica's
    microbatch; on the decoder's it is the whole microbatch, and one piece of the plan.
    """
    made = [each for each in pieces if rank in each.ranks]
    needed = [each for each in pieces if rank in each.edge.consumers]
    assert not (made and needed), "an encoder apart is not where it leads"
    every = [
        Crossing(
            piece=unit,
            unit=unit,
            rows=slice(0, tokens),
            meetings=each.edge.meetings(each.replica, cp=cp),
            microbatch=unit // len(made),
        )
        for (unit, tokens), each in zip(enumerate(units.tokens), cycle(made), strict=False)
    ]
    for unit in range(len(units.tokens)) if needed else ():
        ends = [0, *accumulate(units.row_tokens[unit])]
        every += [
            Crossing(
                piece=unit,
                unit=unit,
                rows=slice(ends[each.samples.start], ends[each.samples.stop]),
                meetings=each.edge.meetings(each.replica, cp=cp),
                microbatch=unit,
            )
            for each in needed
        ]
    groups = needed[0].edge.parts(cp) if needed else ()
    return Crossings(units=units, every=tuple(every), groups=groups, rank=rank)


# The width of what a rank of an encoder's stage hands on to one of the next, by the two.
StageLinks = Mapping[tuple[int, int], int]


def stage_links(layout: Layout, rank: int, *, widths: Sequence[int]) -> StageLinks:
    """A rank's from the stage before and to the one behind its own, where there are such.

    ``widths`` are those of what each stage of ``layout`` but the last hands on.
    """
    pipeline = layout.group("pp", rank) if rank in layout.ranks else []
    links = zip(pairwise(pipeline), widths, strict=False)
    return {pair: width for pair, width in links if rank in pair}


def state_moves(
    what: Cargo,
    states: Sequence[tuple[int, int]],
    links: StageLinks,
    *,
    rank: int,
    dtype: torch.dtype,
) -> StepMoves:
    """What a stage gives and takes of a step's units; of each, its rows and its microbatch."""
    ways = {
        (target, source) if what.back else (source, target): width
        for (source, target), width in links.items()
    }
    return StepMoves(
        moves={
            unit: [RowMove(unit, *way, (slice(0, rows),), (slice(0, rows),)) for way in ways]
            for unit, (rows, _) in enumerate(states)
        },
        microbatches={unit: microbatch for unit, (_, microbatch) in enumerate(states)},
        width=sum(width for (_, target), width in ways.items() if target == rank),  # of one
        dtype=dtype,
    )
