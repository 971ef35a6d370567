"""Pieces from an encoder to the decoder and back, by lists alone: every row once, in its place."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from delivered import dealt, delivered, places_of
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import ENCODER, decoders, part_of

from loongplug.data.microbatch import Share
from loongplug.hetero.bubble_planner import Piece
from loongplug.hetero.communicators import count, piece_pairs, there_and_back
from loongplug.hetero.crossings import Crossings, streamed_crossings
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import Edge, all_ranks_dp
from loongplug.hetero.routes import ExchangeSpec, RowMove, Rows, feature_moves, gradient_moves, size
from loongplug.hetero.wire import StepMoves
from loongplug.parallel.layout import Layout

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Step:
    """A model replica's, with units in pieces, each row of which lies in one chunk of a sequence.

    There are ``chunks`` of each context part.
    """

    edge: Edge
    cp: int
    chunks: int
    units: tuple[tuple[int, ...], ...]  # the chunk of each row
    pieces: tuple[Piece, ...]

    @property
    def spec(self) -> ExchangeSpec:
        parts = range(self.cp * self.chunks)
        shards = tuple(tuple(_slices(unit, part) for part in parts) for unit in self.units)
        return ExchangeSpec(
            tokens=tuple(map(len, self.units)),
            shares=((Share(encoder_replica=0),),) * len(self.units),
            width=1,
            dtype=torch.float32,
            shards=shards if len(parts) > 1 else None,
        )

    def crossings(self, rank: int) -> Crossings:
        return streamed_crossings(self.pieces, self.spec, edge=self.edge, cp=self.cp, rank=rank)

    def moves(self, what: Cargo) -> dict[int, StepMoves]:
        return {rank: self.crossings(rank).of_step(what) for rank in self.edge.ranks}

    def of_unit(self, unit: int) -> list[int]:
        """The numbers of a unit's pieces."""
        return [number for number, each in enumerate(self.pieces) if each.microbatch == unit]

    def held(self, rank: int, number: int) -> list[tuple[int, int]]:
        """What a consumer takes of a piece: rows of its context part, if it meets who has it."""
        piece, part = self.pieces[number], part_of(self.edge, rank, parts=self.cp)
        meetings = self.edge.meetings(piece.replica, cp=self.cp)
        unit, rows = piece.microbatch, places_of((piece.rows,))
        if meetings == ((rank, rank),):  # it has made it itself
            return [(unit, row) for row in rows]
        if len(meetings) == 1 < self.cp or meetings[part][1] != rank:
            return []
        return [(unit, row) for row in rows if self.units[unit][row] // self.chunks == part]

    def needed(self, rank: int, unit: int) -> list[tuple[int, int]]:
        """What a consumer needs of a unit."""
        number = self.cp * self.chunks
        part = part_of(self.edge, rank, parts=number)
        return [(unit, row) for row, own in enumerate(self.units[unit]) if own == part]


def _slices(unit: tuple[int, ...], part: int) -> Rows:
    return tuple(slice(row, row + 1) for row, own in enumerate(unit) if own == part)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Of any decoder and encoder, and units that are cut anywhere."""
    decoder, tp = draw(decoders())
    edge = all_ranks_dp(decoder, entry=ENCODER, tp=tp).edge(ENCODER.name, rank=0)
    chunks = draw(st.sampled_from([1, decoder.tp]))
    chunk = st.integers(0, decoder.cp * chunks - 1)
    units = draw(st.lists(st.lists(chunk, max_size=6).map(tuple), min_size=1, max_size=5))
    replica, pieces = st.integers(0, len(edge.replicas) - 1), []
    for unit, rows in enumerate(units):
        cuts = draw(st.sets(st.integers(1, max(1, len(rows) - 1)), max_size=3))
        ends = sorted({0, len(rows), *(each for each in cuts if each < len(rows))})
        pieces += [
            Piece(microbatch=unit, media=range(0), rows=slice(*each), replica=draw(replica))
            for each in pairwise(ends)
        ]
    return Step(edge, decoder.cp, chunks, tuple(units), tuple(pieces))


def moved_by(
    moves: Callable[[int], Iterable[RowMove]], has: dict[int, Any], wants: dict[int, Any]
) -> dict[int, list[Any]]:
    """What ranks get by lists that all of them know alike; each row comes once."""
    for rank in has:
        others = {move for each in has for move in moves(each) if rank in move[1:3]}
        assert {*moves(rank)} == others
    found: dict[int, list[Any]] = {rank: [None] * len(rows) for rank, rows in wants.items()}
    for rank in has:
        for move in (each for each in moves(rank) if each.target == rank):
            for given_, placed in zip(*map(places_of, move[3:]), strict=True):
                assert found[rank][placed] is None
                found[rank][placed] = has[move.source][given_]
    return found


@given(steps())
@settings(max_examples=60, deadline=None)
def test_every_row_goes_there_and_back(step: Step) -> None:
    """To each consumer what it needs; its gradient to the one rank of a replica that brought it."""
    edge, consumers, numbers = step.edge, step.edge.consumers, range(len(step.pieces))
    made = {
        n: [(x.microbatch, row) for row in places_of((x.rows,))] for n, x in enumerate(step.pieces)
    }
    came = delivered(step.moves(Cargo.FEATURES), lambda _, piece: made[piece])
    expected = {(rank, n): step.held(rank, n) for rank in consumers for n in numbers}
    assert came == {key: rows for key, rows in expected.items() if rows}
    back: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for unit in range(len(step.units)):
        pieces = step.of_unit(unit)
        held = {r: [row for n in pieces for row in came.get((r, n), ())] for r in consumers}
        deals = [step.crossings(rank).deal(unit) for rank in consumers]
        deal = deals[0]
        assert {*map(str, deals)} == {str(deal)}, "all ranks know the same"
        assert deal.copies == (len(consumers) // (step.cp * step.chunks) if deal.rows else 0)
        found = dealt(deal, held)
        assert found == {rank: step.needed(rank, unit) for rank in consumers}
        assert moved_by(deal.there, held, found) == found
        for rank, rows in moved_by(deal.back, found, held).items() if deal.rows else ():
            assert rows == held[rank]
            for n in pieces:
                some = len(came.get((rank, n), ()))
                back[rank, n], rows = rows[:some], rows[some:]
    gradients = delivered(step.moves(Cargo.GRADIENTS), lambda rank, n: back.get((rank, n), []))
    assert gradients == {
        (edge.meetings(x.replica, cp=step.cp)[0][0], n): made[n]
        for n, x in enumerate(step.pieces)
        if made[n]
    }


def crossing(step: Step, what: Cargo) -> list[RowMove]:
    """What goes from one rank to another, by the lists of those that send."""
    return [
        move
        for rank, own in step.moves(what).items()
        for move in chain(*own.moves.values())
        if move.source == rank != move.target
    ]


@given(steps())
@settings(max_examples=60, deadline=None)
def test_as_few_rows_cross_as_can_and_no_more_than_in_an_exchange(step: Step) -> None:
    """Of what the first stage has not made itself, each once; dealing is apart from that."""
    first = {*step.edge.consumers}
    away = [x for x in step.pieces if not first & {*step.edge.replicas[x.replica]}]
    least = sum(size((x.rows,)) for x in away)
    shares = [[] for _ in step.units]
    for each in away:
        share = Share(encoder_replica=each.replica, rows=(each.rows,))
        shares[each.microbatch].append(share)
    units = replace(step.spec, shares=tuple(map(tuple, shares)))
    for what, exact in ((Cargo.FEATURES, feature_moves), (Cargo.GRADIENTS, gradient_moves)):
        exchanged = sum(
            size(move.given)
            for rank in step.edge.ranks
            for move in exact(step.edge, units, rank=rank)
            if move.source == rank != move.target
        )
        crossed = crossing(replace(step, pieces=tuple(away)), what)
        assert least == sum(size(move.given) for move in crossed) <= exchanged
    pairs = {*piece_pairs([step.edge], cp=step.cp)}
    assert pairs >= {(move.source, move.target) for move in crossing(step, Cargo.FEATURES)}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_rank_has_at_most_two_communicators_a_stage_and_part(tp: int, pp: int, cp: int) -> None:
    """Of features and gradients, whatever the tensor parallel sizes are."""
    layout = Layout(tp=tp, pp=pp, cp=cp, dp=2)
    for encoder in (1, tp):
        edges = all_ranks_dp(layout, entry=ENCODER, tp=encoder).edges(ENCODER.name)
        pairs = piece_pairs(edges, cp=cp)
        found = count(there_and_back(pairs))
        assert max(found.values()) <= 2 * pp * cp
        if encoder == 1:  # of each later stage, those that come to this rank
            assert {found[rank] for rank in edges[0].consumers} == {2 * (pp - 1) * cp}


TWO = Step(
    Edge(replicas=((0,), (1,), (2,), (3,)), consumers=(0, 1)),
    1,
    2,
    ((0, 1), (1, 0)),
    tuple(
        Piece(microbatch=unit, media=range(0), rows=slice(0, 2), replica=replica)
        for unit, replica in enumerate((2, 3))
    ),
)


def test_lists_that_do_not_agree_name_ranks_and_pieces() -> None:
    def rows(_: int, piece: int) -> list[int]:
        return [piece] * 2

    found = TWO.moves(Cargo.FEATURES)
    assert delivered(found, rows) == {(0, 0): [0, 0], (1, 1): [1, 1]}
    unsent = {**found, 3: replace(found[3], moves={})}
    with pytest.raises(AssertionError, match="rank 1 takes 2 rows of piece 1, which rank 3 does"):
        delivered(unsent, rows)
    twice = {**found, 2: replace(found[2], moves={**found[2].moves, 9: found[2].moves[0]})}
    with pytest.raises(AssertionError, match=r"rank 2 sends pieces \[9\] to rank 0, who"):
        delivered(twice, rows)
    deal = TWO.crossings(0).deal(0)
    both = replace(deal, holds=(deal.holds[0],) * 2)
    with pytest.raises(AssertionError, match="rank 1 holds row 0, and another one does"):
        dealt(both, {0: [0, 0], 1: [0, 0]})
