"""Where pieces cross from an encoder's ranks to the decoder's first stage, and back. Pure.

In each context part of a sequence, a replica's piece goes to one rank of the tensor parallel group
(:meth:`~loongplug.hetero.placement.Edge.meetings`), with all rows of that part; what a rank of the
first stage has encoded itself it keeps, with those of all parts. A group of these ranks then deals
the rows of a microbatch (:mod:`~loongplug.hetero.dealing`). So each row crosses once, and so does
its gradient.

All ranks at an edge know all pieces, and come to them in one order: an encoder's ranks send theirs
in it and take gradients in it, the decoder's take and give all in it. So the messages from one rank
to another are in one order at both ends.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, batched, chain, cycle

from loongplug.hetero.bubble_planner import Piece
from loongplug.hetero.dealing import Deal
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import ApartPiece, Edge, Meeting
from loongplug.hetero.routes import ExchangeSpec, RowMove, Rows, common, joined, size, within
from loongplug.hetero.wire import StepMoves


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The ``rows`` of a ``unit`` that one encoder replica makes, and their way to the decoder.

    ``piece`` is their number in the plan, and may have several. ``meetings`` are by context part,
    or one for all parts. ``microbatch`` is the one by which sends are bounded, if they are.
    """

    piece: int
    unit: int
    rows: slice
    meetings: tuple[Meeting, ...]
    microbatch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """All of a step that one ``rank`` knows of, in order; ``units`` are what it knows of them.

    ``groups`` are the consumers in its model replica, as they deal among themselves; none on ranks
    that are of no decoder.
    """

    units: ExchangeSpec
    every: tuple[Crossing, ...]
    groups: tuple[tuple[int, ...], ...]
    rank: int

    def of_step(self, what: Cargo) -> StepMoves:
        """The rows that the rank gives and takes of pieces."""
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
        """Those that go to who is met of this part; to one for all parts, all."""
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
    """Those of a step that streams, within a model replica; all its ranks know all of them."""
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
    """Those of an encoder on ranks of its own. ``pieces``: of one microbatch of all replicas.

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
