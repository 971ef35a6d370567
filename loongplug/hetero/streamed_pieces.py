"""Pieces of a step that encoders stream: which there are, who encodes them, and when. Pure.

The same on every rank of a model replica: it follows from the grids of the step's media alone.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from loongplug.data.microbatch import Share
from loongplug.data.positions import Grid
from loongplug.hetero.balance import shares_of
from loongplug.hetero.step_costs import (
    DecoderPass,
    EncoderWork,
    Name,
    PassCosts,
    PieceCost,
)
from loongplug.hetero.stream import PieceWork, Stream

Units = Sequence[Sequence[Grid]]  # of each microbatch, the grids of its media for an encoder


@dataclass(frozen=True, kw_only=True)
class StreamedCosts:
    """What a step takes, in operations of one rank, counted alike on every rank.

    ``of_media`` is one encoder replica's for some media, ``forward`` and ``backward`` are what a
    microbatch takes in the decoder, by place (:class:`~.step_costs.DecoderPass`). With several
    chunks to a rank, each takes ``group`` microbatches in turn. ``tokens`` has a medium's in the
    text. ``of_passes`` is of passes through the encoder.

    Where a step does not stream, ``assigned`` says what each of so many replicas encodes of its
    units; a pass has up to ``joined_rows`` of input, with None one unit.
    """

    of_media: Callable[[Sequence[Grid]], PieceCost]
    tokens: Callable[[Grid], int]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    group: int
    of_passes: PassCosts
    assigned: Callable[[Units, int], Sequence[tuple[Share, ...]]]
    joined_rows: int | None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Neighbouring ``media`` of a microbatch's unit, by their numbers, and their ``rows`` of its
    features; ``replica`` encodes it."""

    microbatch: int
    media: range
    rows: slice
    replica: int

    @property
    def tokens(self) -> int:
        """How many features it has."""
        count: int = self.rows.stop - self.rows.start
        return count


@dataclass(frozen=True, kw_only=True)
class StreamedStep:
    """The ``pieces`` of a step, in order, and what each replica does with its own, by replica.

    ``shares``: who encodes what of each unit; one share for each replica that has media of it.
    ``passes`` are those of each stage; ``trains``: pieces have a backward.
    """

    pieces: tuple[Piece, ...]
    shares: tuple[tuple[Share, ...], ...]
    work: tuple[tuple[PieceWork, ...], ...]
    passes: tuple[tuple[DecoderPass, ...], ...]
    microbatches: int
    trains: bool

    def stream(self, replica: int | None) -> Stream:
        """As one replica's ranks see it; None for ranks of none."""
        behind = [0] * (self.microbatches + 1)
        for each in self.pieces:
            behind[each.microbatch + 1] += 1
        return Stream(
            work=() if replica is None else self.work[replica],
            pieces=tuple(range(first, stop) for first, stop in pairwise(accumulate(behind))),
        )


class InTurn(NamedTuple):
    """An encoder's work of a replica, and in which turn it comes of those before the same pass."""

    work: EncoderWork
    turn: int


def streamed_step(
    work: Sequence[Sequence[InTurn]],
    *,
    costs: StreamedCosts,
    units: Units,
    cuts: Sequence[Sequence[range]],
    passes: tuple[tuple[DecoderPass, ...], ...],
) -> StreamedStep:
    """What is to be sent and done of one encoder's ``work``, by replica.

    Names of pieces number ``cuts``: of each of the ``units``, the media of each piece.
    """
    forwards = [each.work.pieces for of_one in work for each in of_one if each.work.forward]
    runs = _runs(forwards)
    first = {names[0]: number for number, names in enumerate(runs)}
    owners = {
        name: replica
        for replica, of_one in enumerate(work)
        for each in of_one
        for name in each.work.pieces
    }
    tokens = [list(map(costs.tokens, grids)) for grids in units]
    ends = [list(accumulate(each, initial=0)) for each in tokens]
    pieces = []
    for names in runs:
        (unit, begin), (_, end) = names[0], names[-1]
        media = range(cuts[unit][begin].start, cuts[unit][end].stop)
        rows = slice(ends[unit][media.start], ends[unit][media.stop])
        owner = owners[unit, begin]
        pieces.append(Piece(microbatch=unit, media=media, rows=rows, replica=owner))
    return StreamedStep(
        pieces=tuple(pieces),
        shares=_shares(pieces, tokens),
        work=tuple(
            tuple(
                PieceWork(
                    one.before,
                    one.forward,
                    tuple(first[name] for name in one.pieces if name in first),
                    turn,
                )
                for one, turn in of_one
            )
            for of_one in work
        ),
        passes=passes,
        microbatches=len(units),
        trains=costs.of_passes.trains,
    )


def _shares(
    pieces: Iterable[Piece], tokens: Sequence[Sequence[int]]
) -> tuple[tuple[Share, ...], ...]:
    """Of each unit, whose media have so many ``tokens``.

    A unit without media has no piece. Somebody has to have it nevertheless, with nothing to do.
    """
    held: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in tokens]
    for each in pieces:
        held[each.microbatch][each.replica] += each.media
    return tuple(
        shares_of(of_unit or {0: ()}, tokens=each)
        for of_unit, each in zip(held, tokens, strict=True)
    )


def _runs(passes: Iterable[Sequence[Name]]) -> list[list[Name]]:
    """The names of pieces that are sent as one, together; all, in order.

    Those are neighbours of a microbatch that go through an encoder in one pass.
    """
    found: list[list[Name]] = []
    for names in passes:
        found.append([names[0]])
        for last, name in pairwise(names):
            if name == (last[0], last[1] + 1):
                found[-1].append(name)
            else:
                found.append([name])
    return sorted(found)
