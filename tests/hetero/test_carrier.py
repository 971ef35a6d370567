"""Rows from an encoder's ranks to the decoder's and back, by ranks: each once, in its place.

Of encoders on ranks of their own, and of such as stream.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from delivered import dealt, delivered
from parity.built_in import around
from parity.mutations import FAULTS
from placed import ENCODER
from ranks import RankError, run_ranks

from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.data.microbatch import Share
from loongplug.hetero.bubble_planner import Piece
from loongplug.hetero.carrier import Carrier
from loongplug.hetero.crossings import Crossings, apart_crossings, streamed_crossings
from loongplug.hetero.dealing import Deal, Dealer
from loongplug.hetero.exchange import ExchangeSpec, taken
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import ApartPiece, Edge, all_ranks_dp, one_apart
from loongplug.hetero.routes import Rows, sequence_shards
from loongplug.hetero.wire import Wire
from loongplug.parallel.layout import Layout, encoder_layout
from loongplug.parallel.states import create_exchange_group

WIDTH, LENGTH = 3, 8
MICROBATCHES, STEPS, AHEAD = 5, 2, 2
LATE = 0.02  # seconds; what is sent at once is there long before
ROW_BYTES = WIDTH * torch.float32.itemsize


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
        "1-to-2": Case(decoder=Layout(dp=2), encoder=Layout(first_rank=2)),
        "2-to-1": Case(decoder=Layout(), encoder=Layout(dp=2, first_rank=1), samples=3),
        "3-to-2": Case(decoder=Layout(dp=2), encoder=Layout(dp=3, first_rank=2), samples=3),
        "tp2-2": Case(decoder=two, encoder=Layout(dp=2, first_rank=2), samples=2),
        "tp2-2-split": Case(decoder=two, encoder=Layout(dp=2, first_rank=2), samples=2, split=True),
        "tp2-encoder-tp2-split": Case(
            decoder=two, encoder=Layout(tp=2, first_rank=2), samples=2, split=True
        ),
        "tp2-encoder-tp2": Case(decoder=two, encoder=Layout(tp=2, dp=2, first_rank=2), samples=3),
        "tp2-cp2-1": Case(decoder=whole, encoder=Layout(first_rank=4), samples=2),
        "tp2-cp2-split": Case(
            decoder=whole, encoder=Layout(dp=2, first_rank=4), samples=3, split=True
        ),
        "encoder-tp2": Case(decoder=Layout(dp=2), encoder=Layout(tp=2, first_rank=2)),
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
    mine = [each for each in pieces_of(case) if rank in each.edge.encoder_ranks]
    return [(each.edge.decoder, number, each.samples) for number in numbers for each in mine]


def rows_of(case: Case, rank: int, unit: Made, *, step: int = 0) -> torch.Tensor:
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


@pytest.mark.quick
@pytest.mark.parametrize("name", cases())
def test_both_ends_list_the_same_messages(name: str) -> None:
    """A piece's rows to one rank of each context part, which a group deals; and back."""
    case = cases()[name]
    known = {rank: crossings_of(case, rank) for rank in range(case.ranks)}

    def rows(rank: int, unit: int) -> list[float]:
        return rows_of(case, rank, units_of(case, rank)[unit])[:, 0].tolist()

    ends = {rank: each.ends(Cargo.FEATURES) for rank, each in known.items()}
    for rank, own in ends.items():
        for unit, end in own.given.items():
            assert end.microbatch == units_of(case, rank)[unit][1]
    came = delivered(ends, rows)
    for rank in case.decoder.ranks:
        for unit in range(MICROBATCHES):
            deal = known[rank].deal(unit)
            held = {each: came.get((each, unit), []) for each in deal.ranks}
            assert dealt(deal, held)[rank] == rows(rank, unit)
    gradients = {rank: each.ends(Cargo.GRADIENTS) for rank, each in known.items()}
    back = delivered(gradients, lambda rank, unit: came.get((rank, unit), []))
    brings = {meeting[0] for each in pieces_of(case) for meeting in each.edge.meetings(cp=1)}
    expected = {
        (rank, unit): rows(rank, unit)
        for rank in brings
        for unit in range(len(units_of(case, rank)))
    }
    assert back == {key: found for key, found in expected.items() if found}


@dataclass
class Counted:
    """Bytes that this rank sends, by the group, and that groups deal beside that.

    ``late``: it takes its time with each message.
    """

    late: bool
    groups: list[Any] = field(default_factory=list)
    there: int = 0
    back: int = 0
    dealt: int = 0

    def watch(self) -> None:
        isend, exchange, broadcast = dist.isend, dist.all_to_all_single, dist.broadcast

        def sending(tensor: torch.Tensor, *, dst: int, group: Any) -> Any:
            if self.late:
                time.sleep(LATE)
            if group in self.groups[:2]:
                self.there += tensor.nbytes
            else:
                assert group in self.groups[2:]
                self.back += tensor.nbytes
            return isend(tensor, dst=dst, group=group)

        def exchanging(rows: torch.Tensor, out: torch.Tensor, *args: Any) -> Any:
            self.dealt += out.nbytes
            return exchange(rows, out, *args)

        def sharing(tensor: torch.Tensor, **of: Any) -> Any:
            self.dealt += tensor.nbytes
            return broadcast(tensor, **of)

        dist.isend, dist.all_to_all_single, dist.broadcast = sending, exchanging, sharing


def carrier_of(
    everyone: Sequence[int], decoder: Layout, encoder: Layout, counted: Counted, *, most: float
) -> Carrier:
    """Of this rank, over groups of all ranks."""
    ranks = [list(everyone)]
    there = {up: create_exchange_group(f"t{up}", ranks, options_of="pp") for up in (True, False)}
    back = {up: create_exchange_group(f"b{up}", ranks, options_of="pp") for up in (True, False)}
    counted.groups[:] = [*there.values(), *back.values()]
    counted.watch()
    dealers = [
        None if group is None else Dealer(group)
        for group in (
            create_exchange_group("deals", decoder.groups("tp"), options_of="tp"),
            create_exchange_group("shares", encoder.groups("tp"), options_of="tp"),
        )
    ]
    return Carrier(
        wire=Wire(
            {Cargo.FEATURES: there, Cargo.GRADIENTS: back}, most=most, device=torch.device("cpu")
        ),
        deals=dealers[0],
        shares=dealers[1],
    )


def there_and_back(
    rank: int, *, case: Case, trains: bool = True, fault: Callable[[int], None] | None = None
) -> Counted:
    """Steps of microbatches in the order of a pipeline; what this rank has sent."""
    if fault is not None:
        fault(rank)
    # The first of either side sends last what the others have sent long before.
    counted = Counted(late=rank in (0, case.encoder.first_rank))
    everyone = range(case.ranks)
    carrier = carrier_of(everyone, case.decoder, case.encoder, counted, most=AHEAD + 1)
    side = decode if rank in case.decoder.ranks else encode
    for step in range(STEPS):
        carrier.begin(crossings_of(case, rank), None, trains=trains)
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


def count_each_copy_of_a_gradient(rank: int) -> None:
    def summed(original: Any, self: Dealer, came: torch.Tensor, deal: Deal) -> torch.Tensor:
        return original(self, came, deal) * (1 if deal.chunked else len(deal.ranks))

    around("loongplug.hetero.dealing:Dealer.gradients", summed)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("2-to-1", FAULTS["take_pieces_in_order_of_arrival"].put_in),
        ("tp2-2", FAULTS["place_gradients_mirrored"].put_in),
        ("tp2-2-split", FAULTS["place_gradients_mirrored"].put_in),
        ("tp2-encoder-tp2-split", FAULTS["place_gradients_mirrored"].put_in),  # of gradients alone
        ("tp2-encoder-tp2", count_each_copy_of_a_gradient),
    ],
)
def test_a_fault_is_seen(name: str, fault: Callable[[int], None]) -> None:
    case = cases()[name]
    with pytest.raises(RankError, match=r"assert torch\.equal"):
        run_ranks(partial(there_and_back, fault=fault), case.ranks, case=case)


# Within a model replica: an encoder that streams.


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
    "cp2-pp2-split": Streamed(decoder=Layout(cp=2, pp=2), split=True),
    "tp2-cp2-split": Streamed(decoder=Layout(tp=2, cp=2), split=True),
}


def streams(rank: int, *, case: Streamed) -> Counted:
    """Two steps: all pieces set out, microbatches are handed on, and gradients go back."""
    counted, edge = Counted(late=rank == 0), case.edge
    carrier = carrier_of(edge.ranks, case.decoder, case.encoder, counted, most=inf)
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
            part = edge.part_of(rank, parts=spec.parts)
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
        each.tokens
        for step in range(STEPS)
        for each in case.pieces(step)
        if each.replica not in first
    )
    assert there == back
    if case.decoder.cp == 1:  # else ranks of the first stage send each other their parts
        assert there == away * ROW_BYTES
    assert any(each.dealt for each in counted) == (case.decoder.tp > 1)
