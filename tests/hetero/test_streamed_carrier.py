"""Pieces of an encoder that streams to the decoder and back, by ranks: each row once."""

import random
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np
import pytest
import torch
from carried import LENGTH, MICROBATCHES, ROW_BYTES, STEPS, WIDTH, Counted, carrier_of
from placed import ENCODER, part_of
from ranks import run_ranks

from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.data.microbatch import Share
from loongplug.hetero.bubble_planner import Piece
from loongplug.hetero.crossings import streamed_crossings
from loongplug.hetero.exchange import taken
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import Edge, all_ranks_dp
from loongplug.hetero.routes import ExchangeSpec, sequence_shards
from loongplug.parallel.layout import Layout, encoder_layout


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """A decoder, the size of its encoder's replicas, and whether ranks hold chunks."""

    decoder: Layout
    encoder_tp: int = 1
    split: bool = False

    @property
    def encoder(self) -> Layout:
        return encoder_layout(self.decoder, tp=self.encoder_tp, on_first_stage=False)

    @property
    def edge(self) -> Edge:
        placement = all_ranks_dp(self.decoder, entry=ENCODER, tp=self.encoder_tp)
        return placement.edge(ENCODER.name, rank=0)

    def units(self, step: int) -> list[list[int]]:
        """Of each row of a microbatch, where its token lies; one has none."""
        chance = random.Random(step)
        counts = [chance.choice([3, 5, LENGTH]) for _ in range(MICROBATCHES)]
        counts[step] = 0
        return [sorted(chance.sample(range(LENGTH), count)) for count in counts]

    def pieces(self, step: int) -> list[Piece]:
        """Three rows each, by all replicas in turn."""
        cut = [
            (unit, slice(row, min(row + 3, len(rows))))
            for unit, rows in enumerate(self.units(step))
            for row in range(0, len(rows), 3)
        ]
        return [
            Piece(
                microbatch=unit,
                media=range(0),
                rows=rows,
                replica=(number + step) % len(self.edge.replicas),
            )
            for number, (unit, rows) in enumerate(cut)
        ]

    def spec(self, step: int) -> ExchangeSpec:
        cp, tp = self.decoder.cp, self.decoder.tp if self.split else 1
        units = [[np.array(each, dtype=np.int64)] for each in self.units(step)]
        split = TokenSplit.whole(LENGTH) if cp == 1 else zigzag(LENGTH, cp=cp)
        shards = tuple(sequence_shards(each, split=split, tp=tp) for each in units)
        return ExchangeSpec(
            tokens=tuple(len(each) for (each,) in units),
            shares=((Share(encoder_replica=0),),) * len(units),
            width=WIDTH,
            dtype=torch.float32,
            shards=shards if cp * tp > 1 else None,
        )


STREAMED = {
    "pp2": Streamed(decoder=Layout(pp=2)),
    "tp2-pp2": Streamed(decoder=Layout(tp=2, pp=2)),
    "tp2-pp2-split": Streamed(decoder=Layout(tp=2, pp=2), split=True),
    "tp2-pp2-encoder-tp2": Streamed(decoder=Layout(tp=2, pp=2), encoder_tp=2),
    "tp4-encoder-tp2-split": Streamed(decoder=Layout(tp=4), encoder_tp=2, split=True),
    "tp2-cp2": Streamed(decoder=Layout(tp=2, cp=2)),
    "cp3-pp2": Streamed(decoder=Layout(cp=3, pp=2)),
    "cp2-pp2-split": Streamed(decoder=Layout(cp=2, pp=2), split=True),
    "tp2-cp2-split": Streamed(decoder=Layout(tp=2, cp=2), split=True),
}


def streams(rank: int, *, case: Streamed) -> Counted:
    """Two steps: all pieces set out, microbatches are handed on, and gradients go back."""
    counted, edge = Counted(late=rank == 0), case.edge
    carrier = carrier_of(edge.ranks, case.decoder, case.encoder, counted, most=inf, deals="tp_cp")
    for step in range(STEPS):
        spec, pieces = case.spec(step), case.pieces(step)
        wholes = [
            torch.rand(tokens, WIDTH, generator=torch.Generator().manual_seed(unit + 10 * step))
            for unit, tokens in enumerate(spec.tokens)
        ]
        crossings = streamed_crossings(pieces, spec, edge=edge, cp=case.decoder.cp, rank=rank)
        carrier.begin(crossings, None, trains=True)
        mine = [n for n, each in enumerate(pieces) if each.replica == edge.replica_of(rank)]
        for number in mine:
            payload = wholes[pieces[number].microbatch][pieces[number].rows]
            carrier.wire.send(Cargo.FEATURES, number, payload)
        for unit, whole in enumerate(wholes) if rank in edge.consumers else ():
            numbers = [n for n, each in enumerate(pieces) if each.microbatch == unit]
            came = [carrier.wire.receive(Cargo.FEATURES, number) for number in numbers]
            rows = carrier.dealt(unit, came)
            part = part_of(edge, rank, parts=spec.parts)
            assert torch.equal(rows, taken(whole, spec.of_parts(unit)[part])), unit
            gradients = carrier.collected(unit, numbers, -rows)
            for number, gradient in zip(numbers, gradients, strict=True):
                carrier.wire.send(Cargo.GRADIENTS, number, gradient)
        for number in mine:
            came_back = carrier.wire.receive(Cargo.GRADIENTS, number)
            expected = -wholes[pieces[number].microbatch][pieces[number].rows]
            assert torch.equal(carrier.shared((number,), came_back), expected), number
        carrier.wire.drain()
    counted.groups.clear()
    return counted


@pytest.mark.parametrize("name", STREAMED)
def test_pieces_that_stream_go_there_and_back_once(name: str) -> None:
    case = STREAMED[name]
    counted = run_ranks(partial(streams, case=case), case.decoder.world_size)
    there, back = (sum(getattr(each, way) for each in counted) for way in ("there", "back"))
    first = {n for n, each in enumerate(case.edge.replicas) if {*each} & {*case.edge.consumers}}
    away = sum(
        each.rows.stop - each.rows.start
        for step in range(STEPS)
        for each in case.pieces(step)
        if each.replica not in first
    )
    assert there == back == away * ROW_BYTES
    assert any(each.dealt for each in counted) == (len(case.edge.consumers) > 1)
