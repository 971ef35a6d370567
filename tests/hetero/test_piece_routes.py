"""Pieces to the decoder or the next stage and back, by lists alone: each row once, in its place.

``faults/test_placed_steps.py`` has ranks send them.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import ENCODER, decoders, part_of

from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.data.microbatch import Share
from loongplug.hetero.bubble_planner import Piece
from loongplug.hetero.operations import Cargo
from loongplug.hetero.piece_routes import (
    Crossings,
    Deal,
    apart_crossings,
    streamed_crossings,
)
from loongplug.hetero.placement import (
    Edge,
    all_ranks_dp,
    one_apart,
    piece_pairs,
)
from loongplug.hetero.row_moves import (
    ExchangeSpec,
    RowMove,
    Rows,
    feature_moves,
    gradient_moves,
    sequence_shards,
    size,
)
from loongplug.hetero.wire import StepMoves
from loongplug.parallel.layout import Layout

pytestmark = pytest.mark.quick

Row = Any  # what tells it from others


def delivered(
    moves: Mapping[int, StepMoves], rows: Callable[[int, int], Sequence[Row]]
) -> dict[tuple[int, int], list[Row]]:
    """By rank and piece, what it takes where each rank gives its ``rows`` of a piece.

    Messages of two ranks come in the order in which they are given. Both ends list the same, and
    every row of what is taken comes once; an AssertionError names ranks and pieces.
    """
    queues: defaultdict[tuple[int, int], deque[tuple[int, list[Row]]]] = defaultdict(deque)
    for rank, own in moves.items():
        for piece, several in own.moves.items():
            given = [each for each in several if each.source == rank]
            for move in given:
                whole = rows(rank, piece)
                assert len(whole) == sum(size(each.given) for each in given), (rank, piece)
                sent = [whole[place] for place in places_of(move.given)]
                if sent:
                    queues[rank, move.target].append((piece, sent))
    found = {}
    for rank, own in moves.items():
        for piece, several in own.moves.items():
            came: list[tuple[int, Row]] = []
            for move in several:
                if move.target == rank and (places := places_of(move.placed)):
                    queue = queues[move.source, rank]
                    said = f"rank {rank} takes {len(places)} rows of piece {piece}"
                    assert queue, f"{said}, which rank {move.source} does not send"
                    number, sent = queue.popleft()
                    others = f"rank {move.source} sends {len(sent)} rows of piece {number}"
                    assert len(sent) == len(places), f"{said}, and {others}"
                    came += zip(places, sent, strict=True)
            if came:
                assert sorted(place for place, _ in came) == [*range(len(came))], (rank, piece)
                found[rank, piece] = [row for _, row in sorted(came)]
    for (source, target), left in queues.items():
        pieces = [piece for piece, _ in left]
        assert not left, f"rank {source} sends pieces {pieces} to rank {target}, who takes none"
    return found


def dealt(deal: Deal, held: Mapping[int, Sequence[Row]]) -> dict[int, list[Row]]:
    """What each rank of a group comes to have of a microbatch, of what each ``held``."""
    whole: dict[int, Row] = {}
    for rank, rows in zip(deal.ranks, deal.holds, strict=True):
        for place, row in zip(places_of(rows), held[rank], strict=True):
            assert place not in whole, f"rank {rank} holds row {place}, and another one does"
            whole[place] = row
    assert sorted(whole) == [*range(deal.rows)]
    needed = zip(deal.ranks, deal.needs, strict=True)
    return {rank: [whole[place] for place in places_of(rows)] for rank, rows in needed}


def places_of(rows: Rows) -> list[int]:
    return [place for each in rows for place in range(each.start, each.stop)]


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


LENGTH, MICROBATCHES = 8, 3
Made = tuple[int, int, range]  # of a decoder replica, the number of a microbatch, its samples


@dataclass(frozen=True, kw_only=True)
class Apart:
    """An encoder on ranks behind its decoder's.

    ``split``: each rank of the decoder's tensor parallel groups holds a chunk of the sequence.
    """

    decoder: Layout
    encoder: Layout
    samples: int  # of a decoder replica's microbatch
    split: bool

    @property
    def pieces(self) -> tuple[Any, ...]:
        sizes = {"tp": self.encoder.tp, "dp": self.encoder.dp}
        place = one_apart(self.decoder, entry=ENCODER, rank_offset=self.encoder.first_rank, **sizes)
        return place.pieces(ENCODER.name, micro_batch_size=self.samples)

    @property
    def shares(self) -> TokenSplit:
        """Which tokens of a row each context parallel rank holds."""
        cp = self.decoder.cp
        return TokenSplit.whole(LENGTH) if cp == 1 else zigzag(LENGTH, cp=cp)

    def places(self, unit: Made) -> list[np.ndarray]:
        """Of each sample of a unit, where its tokens lie."""
        replica, number, samples = unit
        chance = random.Random(f"{replica} {number}")
        counts = [chance.choice([0, 0, 1, 3, LENGTH]) for _ in range(self.samples)]
        found = [np.array(sorted(chance.sample(range(LENGTH), count))) for count in counts]
        return found[samples.start : samples.stop]

    def units(self, rank: int) -> list[Made]:
        """What a rank makes in a step, or needs."""
        numbers = range(MICROBATCHES)
        if rank in self.decoder.ranks:
            replica = self.decoder.coordinates(rank).dp
            return [(replica, number, range(self.samples)) for number in numbers]
        mine = [each for each in self.pieces if rank in each.ranks]
        return [(each.decoder, number, each.samples) for number in numbers for each in mine]

    def rows(self, unit: Made) -> list[tuple[int, ...]]:
        """Of a unit all rows: their replica, microbatch, sample, and place in it."""
        replica, number, samples = unit
        each_with = zip(samples, self.places(unit), strict=True)
        return [(replica, number, sample, int(at)) for sample, own in each_with for at in own]

    def needed(self, rank: int, unit: Made) -> list[tuple[int, ...]]:
        """Those that a rank of the decoder's needs."""
        place = self.decoder.coordinates(rank)
        held = self.shares.parts[place.cp].places
        if self.split:
            held = np.split(held, self.decoder.tp)[place.tp]
        return [row for row in self.rows(unit) if row[-1] in held]

    def crossings(self, rank: int) -> Crossings:
        units = [self.places(unit) for unit in self.units(rank)]
        shards: tuple[tuple[Rows, ...], ...] | None = None
        if self.split or self.decoder.cp > 1:
            tp = self.decoder.tp if self.split else 1
            shards = tuple(sequence_shards(each, split=self.shares, tp=tp) for each in units)
        row_tokens = tuple(tuple(map(len, each)) for each in units)
        spec = ExchangeSpec(
            tokens=tuple(map(sum, row_tokens)),
            shares=((Share(encoder_replica=0),),) * len(units),
            width=1,
            dtype=torch.float32,
            shards=shards,
            row_tokens=row_tokens,
        )
        return apart_crossings(self.pieces, spec, cp=self.decoder.cp, rank=rank)


@st.composite
def encoders_apart(draw: st.DrawFn) -> Apart:
    small = st.integers(1, 3)
    decoder = Layout(
        tp=draw(st.sampled_from([1, 2, 4])), cp=draw(st.sampled_from([1, 2])), dp=draw(small)
    )
    encoder = Layout(tp=draw(st.integers(1, 2)), dp=draw(small), first_rank=decoder.world_size)
    return Apart(decoder=decoder, encoder=encoder, samples=draw(small), split=draw(st.booleans()))


@given(encoders_apart())
@settings(max_examples=60, deadline=None)
def test_every_row_of_an_encoder_apart_goes_there_and_back(case: Apart) -> None:
    """Units without tokens among them; a replica of the encoder may have none at all."""
    crossings = {rank: case.crossings(rank) for rank in range(case.encoder.ranks.stop)}
    units = {rank: case.units(rank) for rank in crossings}
    for rank, each in crossings.items():  # by which sends are bounded
        numbers = each.of_step(Cargo.FEATURES).microbatches
        assert numbers == {n: unit[1] for n, unit in enumerate(units[rank]) if n in numbers}

    def moves(what: Cargo) -> dict[int, StepMoves]:
        return {rank: each.of_step(what) for rank, each in crossings.items()}

    came = delivered(moves(Cargo.FEATURES), lambda rank, unit: case.rows(units[rank][unit]))
    count = 0
    for ranks, number in product(case.decoder.groups("tp"), range(MICROBATCHES)):
        held = {rank: came.get((rank, number), []) for rank in ranks}
        deal, *others = (crossings[rank].deal(number) for rank in ranks)
        assert all(each == deal for each in others), "all ranks know the same"
        found = dealt(deal, held)
        assert found == {rank: case.needed(rank, units[rank][number]) for rank in ranks}
        count += sum(map(len, held.values()))
        if deal.rows:
            assert moved_by(deal.there, held, found) == found
            assert moved_by(deal.back, found, held) == held
    every = product(range(case.decoder.dp), range(MICROBATCHES), [range(case.samples)])
    assert count == sum(len(case.rows(unit)) for unit in every), "each crosses once"
    gradients = delivered(moves(Cargo.GRADIENTS), lambda rank, unit: came.get((rank, unit), []))
    cp = case.decoder.cp
    brings = {each.edge.meetings(each.replica, cp=cp)[0][0] for each in case.pieces}
    assert {key: rows for key, rows in gradients.items() if rows} == {
        (rank, unit): rows
        for rank in brings
        for unit, each in enumerate(units[rank])
        if (rows := case.rows(each))
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
