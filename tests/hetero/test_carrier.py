"""Rows from an encoder on ranks of its own to the decoder's and back: each once, in its place."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from carried import AHEAD, LENGTH, MICROBATCHES, ROW_BYTES, STEPS, WIDTH, Counted, carrier_of
from placed import ENCODER
from ranks import run_ranks

from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.data.microbatch import Share
from loongplug.hetero.operations import Cargo
from loongplug.hetero.piece_carrier import Carrier
from loongplug.hetero.piece_routes import Crossings, apart_crossings
from loongplug.hetero.placement import ApartPiece, one_apart
from loongplug.hetero.row_moves import ExchangeSpec, Rows, sequence_shards
from loongplug.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Case:
    """A decoder, its encoder, and whether each rank of a tensor parallel group holds a chunk."""

    decoder: Layout
    encoder: Layout
    samples: int = 1  # of a decoder replica's microbatch
    split: bool = False

    @property
    def ranks(self) -> int:
        return self.encoder.ranks.stop

    @property
    def shares(self) -> TokenSplit:
        """Which tokens of a row each context parallel rank holds."""
        cp = self.decoder.cp
        return TokenSplit.whole(LENGTH) if cp == 1 else zigzag(LENGTH, cp=cp)

    def places(self, replica: int, number: int) -> list[np.ndarray]:
        """Of each sample of a decoder replica's microbatch, where its tokens lie."""
        chance = random.Random(f"{replica} {number}")
        return [
            np.array(sorted(chance.sample(range(LENGTH), chance.choice([0, 0, 1, 3, LENGTH]))))
            for _ in range(self.samples)
        ]


def cases() -> dict[str, Case]:
    two, whole = Layout(tp=2), Layout(tp=2, cp=2)
    return {
        "2-to-1": Case(decoder=Layout(), encoder=Layout(dp=2, first_rank=1), samples=3),
        "3-to-2": Case(decoder=Layout(dp=2), encoder=Layout(dp=3, first_rank=2), samples=3),
        "tp2-2-split": Case(decoder=two, encoder=Layout(dp=2, first_rank=2), samples=2, split=True),
        "tp2-encoder-tp2-split": Case(
            decoder=two, encoder=Layout(tp=2, first_rank=2), samples=2, split=True
        ),
        "tp2-encoder-tp2": Case(decoder=two, encoder=Layout(tp=2, dp=2, first_rank=2), samples=3),
        "tp2-cp2-1": Case(decoder=whole, encoder=Layout(first_rank=4), samples=2),
        "tp2-cp2-split": Case(
            decoder=whole, encoder=Layout(dp=2, first_rank=4), samples=3, split=True
        ),
        "without-samples": Case(decoder=Layout(), encoder=Layout(dp=2, first_rank=1)),
    }


def made(case: Case, step: int, replica: int, number: int, samples: range) -> torch.Tensor:
    """Features that say whose they are, [tokens, WIDTH]."""
    rows = [
        torch.arange(len(places)) + 10.0 * (sample + 10 * (number + 10 * (replica + 10 * step)))
        for sample, places in enumerate(case.places(replica, number))
        if sample in samples
    ]
    return torch.cat(rows).unsqueeze(1) + torch.arange(1, WIDTH + 1) / 10


Made = tuple[int, int, range]  # of a decoder replica, the number of a microbatch, its samples


def pieces_of(case: Case) -> tuple[ApartPiece, ...]:
    sizes = {"tp": case.encoder.tp, "dp": case.encoder.dp, "rank_offset": case.decoder.world_size}
    placement = one_apart(case.decoder, entry=ENCODER, **sizes)
    return placement.pieces(ENCODER.name, micro_batch_size=case.samples)


def units_of(case: Case, rank: int) -> list[Made]:
    """What a rank makes in a step, or needs."""
    numbers = range(MICROBATCHES)
    if rank in case.decoder.ranks:
        replica = case.decoder.coordinates(rank).dp
        return [(replica, number, range(case.samples)) for number in numbers]
    mine = [each for each in pieces_of(case) if rank in each.ranks]
    return [(each.decoder, number, each.samples) for number in numbers for each in mine]


def rows_of(case: Case, rank: int, unit: Made, *, step: int) -> torch.Tensor:
    """What a rank makes of a unit, or needs of it, [rows, WIDTH]."""
    replica, number, samples = unit
    whole = made(case, step, replica, number, samples)
    if rank not in case.decoder.ranks:
        return whole
    place = case.decoder.coordinates(rank)
    held = case.shares.parts[place.cp].places
    if case.split:
        held = np.split(held, case.decoder.tp)[place.tp]
    return whole[np.isin(np.concatenate(case.places(replica, number)), held)]


def spec_of(case: Case, rank: int) -> ExchangeSpec:
    """What a rank knows of its units."""
    units = [
        case.places(replica, number)[samples.start : samples.stop]
        for replica, number, samples in units_of(case, rank)
    ]
    shards: tuple[tuple[Rows, ...], ...] | None = None
    if case.split or case.decoder.cp > 1:
        tp = case.decoder.tp if case.split else 1
        shards = tuple(sequence_shards(each, split=case.shares, tp=tp) for each in units)
    row_tokens = tuple(tuple(map(len, each)) for each in units)
    return ExchangeSpec(
        tokens=tuple(map(sum, row_tokens)),
        shares=((Share(encoder_replica=0),),) * len(units),
        width=WIDTH,
        dtype=torch.float32,
        shards=shards,
        row_tokens=row_tokens,
    )


def crossings_of(case: Case, rank: int) -> Crossings:
    return apart_crossings(pieces_of(case), spec_of(case, rank), cp=case.decoder.cp, rank=rank)


def there_and_back(rank: int, *, case: Case, trains: bool = True) -> Counted:
    """Steps of microbatches in the order of a pipeline; what this rank has sent."""
    # The first of either side sends last what the others have sent long before.
    counted = Counted(late=rank in (0, case.encoder.first_rank))
    everyone = range(case.ranks)
    carrier = carrier_of(everyone, case.decoder, case.encoder, counted, most=AHEAD + 1)
    side = decode if rank in case.decoder.ranks else encode
    crossings = crossings_of(case, rank)
    numbers = crossings.of_step(Cargo.FEATURES).microbatches
    assert numbers == {n: unit[1] for n, unit in enumerate(units_of(case, rank)) if n in numbers}
    for step in range(STEPS):
        carrier.begin(crossings, trains=trains)
        rows = [rows_of(case, rank, unit, step=step) for unit in units_of(case, rank)]
        side(carrier, rows, trains)
        carrier.wire.drain()
    counted.groups.clear()
    return counted


def encode(carrier: Carrier, payloads: list[torch.Tensor], trains: bool) -> None:
    """Ahead of the gradients by some microbatches."""
    ahead = AHEAD * len(payloads) // MICROBATCHES
    for unit in range(len(payloads) + ahead):
        if unit < len(payloads):
            carrier.wire.send(Cargo.FEATURES, unit, payloads[unit])
        if trains and (old := unit - ahead) >= 0:
            came = carrier.shared((old,), carrier.wire.receive(Cargo.GRADIENTS, old))
            assert torch.equal(came, -payloads[old]), old


def decode(carrier: Carrier, needed: list[torch.Tensor], trains: bool) -> None:
    for number, expected in enumerate(needed):
        rows = carrier.dealt(number, [carrier.wire.receive(Cargo.FEATURES, number)])
        assert torch.equal(rows, expected), number
        if trains:
            (held,) = carrier.collected(number, (number,), -rows)
            carrier.wire.send(Cargo.GRADIENTS, number, held)


def needed(case: Case) -> int:
    """Bytes that the decoder's replicas need, each row once."""
    replicas = range(case.decoder.dp)
    rows = sum(
        sum(map(len, case.places(replica, number)))
        for replica in replicas
        for number in range(MICROBATCHES)
    )
    return STEPS * rows * ROW_BYTES


@pytest.mark.parametrize("name", cases())
def test_every_row_goes_there_and_back_once(name: str) -> None:
    """Units without tokens among them, and one sender of each side is later than the others."""
    case = cases()[name]
    counted = run_ranks(there_and_back, case.ranks, case=case)
    there, back = (sum(getattr(each, way) for each in counted) for way in ("there", "back"))
    assert there == back == needed(case) > 0
    assert bool(sum(each.dealt for each in counted)) == (case.decoder.tp > 1 or case.encoder.tp > 1)


def test_nothing_goes_back_where_nothing_trains() -> None:
    case = cases()["2-to-1"]
    counted = run_ranks(there_and_back, case.ranks, case=case, trains=False)
    assert sum(each.there for each in counted) == needed(case)
    assert not any(each.back for each in counted)
