"""Rows from an encoder on ranks of its own to the decoder's and back: each once, in its place."""

import random
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from delivered import delivered
from parity.mutations import FAULTS
from placed import ENCODER
from ranks import RankError, run_ranks

from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.data.microbatch import Share
from loongplug.hetero.edge import Transport, apart_ends, apart_wire
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import ApartPiece, one_apart
from loongplug.hetero.routes import Rows, sequence_shards
from loongplug.hetero.wire import Wire
from loongplug.parallel.layout import Layout
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
    two = Layout(tp=2)
    return {
        "1-to-2": Case(decoder=Layout(dp=2), encoder=Layout(first_rank=2)),
        "2-to-1": Case(decoder=Layout(), encoder=Layout(dp=2, first_rank=1), samples=3),
        "3-to-2": Case(decoder=Layout(dp=2), encoder=Layout(dp=3, first_rank=2), samples=3),
        "tp2-2": Case(decoder=two, encoder=Layout(dp=2, first_rank=2), samples=2),
        "tp2-2-split": Case(decoder=two, encoder=Layout(dp=2, first_rank=2), samples=2, split=True),
        "tp2-encoder-tp2-split": Case(
            decoder=two, encoder=Layout(tp=2, first_rank=2), samples=2, split=True
        ),
        "tp2-cp2-1": Case(decoder=Layout(tp=2, cp=2), encoder=Layout(first_rank=4), samples=2),
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


Piece = tuple[int, int, range]  # of a decoder replica, the number of a microbatch, its samples


def pieces_of(case: Case) -> tuple[ApartPiece, ...]:
    sizes = {"tp": case.encoder.tp, "dp": case.encoder.dp, "rank_offset": case.decoder.world_size}
    placement = one_apart(case.decoder, entry=ENCODER, **sizes)
    return placement.pieces(ENCODER.name, micro_batch_size=case.samples)


def units_of(case: Case, rank: int) -> list[Piece]:
    """What a rank makes in a step, or needs."""
    numbers = range(MICROBATCHES)
    if rank in case.decoder.ranks:
        replica = case.decoder.coordinates(rank).dp
        return [(replica, number, range(case.samples)) for number in numbers]
    mine = [each for each in pieces_of(case) if rank in each.edge.encoder_ranks]
    return [(each.edge.decoder, number, each.samples) for number in numbers for each in mine]


def rows_of(case: Case, rank: int, unit: Piece, *, step: int = 0) -> torch.Tensor:
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


@pytest.mark.quick
@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("what", [Cargo.FEATURES, Cargo.GRADIENTS])
def test_both_ends_list_the_same_messages(name: str, what: Cargo) -> None:
    """Of each part of the sequence to its first rank, from a replica's first; and back."""
    case = cases()[name]
    pieces, specs = pieces_of(case), {rank: spec_of(case, rank) for rank in range(case.ranks)}

    def rows(rank: int, unit: int) -> list[float]:
        return rows_of(case, rank, units_of(case, rank)[unit])[:, 0].tolist()

    ends = {rank: apart_ends(what, spec, pieces=pieces, rank=rank) for rank, spec in specs.items()}
    for rank, own in ends.items():
        for end, (_, number, _) in zip(own.given.values(), units_of(case, rank), strict=False):
            assert end.microbatch == number
    makers = {each.edge.encoder_ranks[0] for each in pieces}
    first = (each.edge.feature_receivers(parts=specs[0].parts) for each in pieces)
    takers = makers if what.back else {*chain(*first)}
    expected = {
        (rank, unit): rows(rank, unit) for rank in takers for unit in range(len(specs[rank].tokens))
    }
    assert delivered(ends, rows) == {key: found for key, found in expected.items() if found}


@dataclass
class Counted:
    """Bytes that this rank sends, by the group; ``late``: it takes its time with each message."""

    late: bool
    there: int = 0
    back: int = 0
    groups: list[Any] = field(default_factory=list)

    def around(self, isend: Any) -> Any:
        def counting(tensor: torch.Tensor, *, dst: int, group: Any) -> Any:
            if self.late:
                time.sleep(LATE)
            if group is self.groups[0]:
                self.there += tensor.nbytes
            else:
                assert group is self.groups[1]
                self.back += tensor.nbytes
            return isend(tensor, dst=dst, group=group)

        return counting


def there_and_back(rank: int, *, case: Case, trains: bool = True, fault: str = "") -> Counted:
    """Steps of microbatches in the order of a pipeline; what this rank has sent."""
    if fault:
        FAULTS[fault].put_in(rank)
    everyone = [list(range(case.ranks))]
    there, back = (create_exchange_group(name, everyone, options_of="pp") for name in "tb")
    encodes = [] if case.encoder.tp == 1 else case.encoder.groups("tp")
    decodes = [] if case.decoder.tp == 1 or case.split else case.decoder.groups("tp")
    together = create_exchange_group("together", [*encodes, *decodes], options_of="tp")
    assert there is not None
    assert back is not None
    # The first of either side sends last what the others have sent long before.
    counted = Counted(late=rank in (0, case.encoder.first_rank), groups=[there, back])
    dist.isend = counted.around(dist.isend)
    edges = apart_wire(
        pieces_of(case),
        Transport(there=there, back=back, together=together),
        in_flight=AHEAD + 1,
        device=torch.device("cpu"),
    )
    side = decode if rank in case.decoder.ranks else encode
    for step in range(STEPS):
        edges.begin(spec_of(case, rank), trains=trains)
        side(edges, [rows_of(case, rank, unit, step=step) for unit in units_of(case, rank)], trains)
        edges.drain()
    counted.groups.clear()
    return counted


def encode(edges: Wire[ExchangeSpec], payloads: list[torch.Tensor], trains: bool) -> None:
    """Ahead of the gradients by some microbatches."""
    ahead = AHEAD * len(payloads) // MICROBATCHES
    for unit in range(len(payloads) + ahead):
        if unit < len(payloads):
            edges.send(Cargo.FEATURES, unit, payloads[unit])
        if trains and (old := unit - ahead) >= 0:
            assert torch.equal(edges.receive(Cargo.GRADIENTS, old), -payloads[old]), old


def decode(edges: Wire[ExchangeSpec], needed: list[torch.Tensor], trains: bool) -> None:
    for number, expected in enumerate(needed):
        rows = edges.receive(Cargo.FEATURES, number)
        assert torch.equal(rows, expected), number
        if trains:
            edges.send(Cargo.GRADIENTS, number, -rows)


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


def test_nothing_goes_back_where_nothing_trains() -> None:
    case = cases()["2-to-1"]
    counted = run_ranks(there_and_back, case.ranks, case=case, trains=False)
    assert sum(each.there for each in counted) == needed(case)
    assert not any(each.back for each in counted)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("2-to-1", "take_pieces_in_order_of_arrival"),
        ("tp2-2-split", "add_rows_instead_of_placing"),
    ],
)
def test_a_fault_is_seen(name: str, fault: str) -> None:
    case = cases()[name]
    with pytest.raises(RankError, match=r"assert torch\.equal"):
        run_ranks(partial(there_and_back, fault=fault), case.ranks, case=case)
