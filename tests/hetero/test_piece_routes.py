"""Pieces to the decoder or the next stage and back, by lists alone: each row once, in its place."""

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
from loongplug.hetero.communicators import count, piece_pairs, stage_pairs, there_and_back
from loongplug.hetero.encoder_place import EncoderPlace
from loongplug.hetero.operations import Cargo
from loongplug.hetero.piece_routes import (
    Crossings,
    stage_links,
    state_moves,
    streamed_crossings,
)
from loongplug.hetero.placement import Edge, all_ranks_dp, one_apart
from loongplug.hetero.row_moves import (
    ExchangeSpec,
    RowMove,
    Rows,
    feature_moves,
    gradient_moves,
    size,
)
from loongplug.hetero.wire import StepMoves
from loongplug.models.entries import Entry, Role
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


ROWS = [3, 0, 5, 1, 4]


@pytest.mark.parametrize("what", [Cargo.STATES, Cargo.STATE_GRADIENTS])
def test_both_ends_list_the_same_messages(what: Cargo) -> None:
    states, layout = [*zip(ROWS, (0, 0, 1, 1, 2), strict=True)], Layout(pp=3)
    around = {rank: stage_links(layout, rank, widths=[10, 11]) for rank in layout.ranks}
    moves = {
        rank: state_moves(what, states, links, rank=rank, dtype=torch.float32)
        for rank, links in around.items()
    }
    found = delivered(moves, lambda rank, unit: [(rank, row) for row in range(ROWS[unit])])
    from_where = 1 if what.back else -1
    assert found == {
        (rank, unit): [(rank + from_where, row) for row in range(rows)]
        for rank in around
        if rank + from_where in around
        for unit, rows in enumerate(ROWS)
        if rows
    }
    assert [moves[1].width, moves[1].microbatches[3]] == [11 if what.back else 10, 1]


def test_ranks_hand_on_to_those_of_the_next_stage() -> None:
    layout = Layout(tp=2, pp=3, first_rank=4)
    assert stage_pairs(layout) == [(4, 6), (6, 8), (5, 7), (7, 9)]
    for rank in layout.ranks:
        links = stage_links(layout, rank, widths=[1, 2])
        assert links.keys() == {pair for pair in stage_pairs(layout) if rank in pair}
    assert not stage_links(layout, 3, widths=[1, 2])
    assert stage_pairs(Layout(tp=2, dp=2, first_rank=1)) == []


def test_all_stages_of_a_replica_have_the_same_pieces_and_the_first_is_given_media() -> None:
    entry = Entry(name="eyes", role=Role.ENCODER, into="text")
    sizes = {"tp": 2, "pp": 2, "dp": 3, "rank_offset": 2}
    placement = one_apart(Layout(dp=2), entry=entry, **sizes)
    pieces = placement.pieces("eyes", micro_batch_size=3)
    layout = placement.entry("eyes").layout
    place = EncoderPlace(state=None, replica_group=None, layout=layout, pieces={True: pieces})
    for rank in layout.ranks:
        at = layout.coordinates(rank)
        mine = tuple(each for each in pieces if each.replica == at.dp)
        assert place.made_by(rank, training=True) == mine
        assert place.given_media(rank) == (2 + 2 * at.dp, 3 + 2 * at.dp)
    assert {rank for each in pieces for rank in each.ranks} == set(range(8, 14))
    assert place.made_by(0, training=True) == ()
