"""Rows on their way: every one comes, to the right rank and place, and no other is sent.

And ranks share the sending.
"""

import random
from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import ENCODER, part_of, placements
from ranks import run_ranks

from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.data.microbatch import Share
from loongplug.hetero.exchange import AllToAll
from loongplug.hetero.placement import Edge, all_ranks_dp, first_stage_dp
from loongplug.hetero.row_moves import (
    ExchangeSpec,
    Rows,
    feature_moves,
    gradient_moves,
    sequence_shards,
    size,
)
from loongplug.observe.recorder import TraceRecorder
from loongplug.parallel.exchange_groups import create_exchange_group
from loongplug.parallel.layout import Layout

WIDTH = 3
ROUNDS = 12
FEW = settings(max_examples=30, deadline=None)


def payload(unit: int, tokens: int) -> torch.Tensor:
    """Rows that say whose they are, [tokens, WIDTH]."""
    rows = torch.arange(tokens).unsqueeze(1) * 10 + torch.arange(WIDTH)
    return (rows + 1000.0 * (unit + 1)).to(torch.float32)


def made_up(place: random.Random, groups: int, *, parts: int) -> ExchangeSpec:
    """Any number of units of any size; those without rows are many."""
    number = place.choice([0, 1, 2, groups, groups + 1, 2 * groups + 1])
    tokens = tuple(place.choice([0, 0, 1, 2, 3, 40]) for _ in range(number))
    shards = tuple(sequence_of(place, each, parts) for each in tokens) if parts > 1 else None
    return ExchangeSpec(
        tokens=tokens,
        shares=tuple(shares_of(place, each, groups) for each in tokens),
        width=WIDTH,
        dtype=torch.float32,
        shards=shards,
    )


def shares_of(place: random.Random, tokens: int, groups: int) -> tuple[Share, ...]:
    """One replica has all, or several have media of the unit, not always neighbours."""
    owners = place.sample(range(groups), place.randint(1, groups))
    if len(owners) == 1:
        return (Share(encoder_replica=owners[0]),)
    cuts = sorted(place.randint(0, tokens) for _ in range(2 * len(owners)))
    media = [slice(first, behind) for first, behind in pairwise([0, *cuts, tokens])]
    return tuple(
        Share(
            encoder_replica=owner,
            media=tuple(range(len(media))[number :: len(owners)]),
            rows=tuple(media[number :: len(owners)]),
        )
        for number, owner in enumerate(owners)
    )


def sequence_of(place: random.Random, tokens: int, parts: int) -> tuple[Rows, ...]:
    """Two rows of a microbatch, each cut among the parts, there and back, and some get nothing."""
    shards: list[list[slice]] = [[] for _ in range(parts)]
    for start, stop in ((0, tokens // 2), (tokens // 2, tokens)):
        cuts = sorted(place.randint(start, stop) for _ in range(2 * parts - 1))
        edges = pairwise([start, *cuts, stop])
        for shard, (first, behind) in zip([*shards, *shards[::-1]], edges, strict=True):
            shard += [slice(first, behind)] if behind > first else []
    return tuple(tuple(shard) for shard in shards)


def rows_of(units: ExchangeSpec, unit: int, replica: int) -> torch.Tensor | None:
    """The rows of a unit that a replica encodes, [rows, WIDTH]; None for no share."""
    whole = payload(unit, units.tokens[unit])
    for share in units.shares[unit]:
        if share.encoder_replica == replica:
            return whole if share.rows is None else torch.cat([whole[each] for each in share.rows])
    return None


def needed_of(units: ExchangeSpec, unit: int, part: int) -> torch.Tensor:
    """The rows of a unit that a consumer of this part of the sequence needs, [rows, WIDTH]."""
    whole = payload(unit, units.tokens[unit])
    if units.shards is None:
        return whole
    return torch.cat([whole[:0], *(whole[each] for each in units.shards[unit][part])])


def there_and_back(
    rank: int, *, decoder: Layout, tp: int, everywhere: bool, split: bool
) -> tuple[int, int]:
    """Bytes that this rank has sent in both directions, and that it had to send."""
    events = []
    recorder = TraceRecorder(events.extend)
    place = all_ranks_dp if everywhere else first_stage_dp
    placement = place(decoder, entry=ENCODER, tp=tp)
    edge = placement.edge(ENCODER.name, rank=rank)
    group = create_exchange_group(
        ENCODER.name, [each.ranks for each in placement.edges(ENCODER.name)], options_of="tp"
    )
    assert (group is None) == (rank not in edge.ranks)
    exchange = AllToAll(edge, group, device=torch.device("cpu"), recorder=recorder)
    encodes = any(rank in each for each in edge.replicas)
    consumes = rank in edge.consumers
    if not encodes and not consumes:
        return 0, 0
    chance = random.Random(decoder.group("tp_cp_pp", rank)[0])  # the same within a replica
    needed = 0
    for _ in range(ROUNDS):
        parts = decoder.cp * (decoder.tp if split else 1)
        units = made_up(chance, len(edge.replicas), parts=parts)
        replica = edge.replica_of(rank)
        mine = {}
        for unit in range(len(units.tokens)):
            rows = None if replica is None else rows_of(units, unit, replica)
            if rows is not None:
                mine[unit] = rows.requires_grad_()
        arrived = exchange.gather_variable_shape_embeddings(mine, units)
        assert sorted(arrived) == (list(range(len(units.tokens))) if consumes else [])
        for unit, rows in arrived.items():
            assert torch.equal(
                rows, needed_of(units, unit, part_of(edge, rank, parts=units.parts))
            ), unit
            assert not rows.requires_grad
        gradients = exchange.scatter_variable_shape_embeddings(
            {unit: -rows for unit, rows in arrived.items()}, units
        )
        assert gradients.keys() == mine.keys()
        for unit, rows in gradients.items():
            assert torch.equal(rows, -mine[unit]), unit
        needed += received_by(units, edge, rank)
    recorder.close()
    assert len(events) == 2 * ROUNDS
    assert {event.phase for event in events} == {"exchange"}
    return sum(event.details["bytes"] for event in events), needed


def received_by(units: ExchangeSpec, edge: Edge, rank: int) -> int:
    """Bytes that a rank has to get from others, by the definition of what it needs."""
    part = part_of(edge, rank, parts=units.parts) if rank in edge.consumers else None
    replica = edge.replica_of(rank)
    rows = 0
    for unit in range(len(units.tokens)):
        needed = set() if part is None else firsts(needed_of(units, unit, part))
        encoded = None if replica is None else rows_of(units, unit, replica)
        own = set() if encoded is None else firsts(encoded)
        rows += len(needed - own)  # features
        # Gradients, all but those of its own part of the sequence.
        rows += len(own - needed)
    return rows * units.width * units.dtype.itemsize


def firsts(rows: torch.Tensor) -> set[float]:
    """What tells them apart."""
    return set(rows[:, 0].tolist())


CASES = {
    "tp2": (Layout(tp=2), 1, False),
    "tp4-encoder2-dp": (Layout(tp=4), 2, False),
    "tp2-cp2": (Layout(tp=2, cp=2), 1, False),
    "tp2-pp2-first-stage": (Layout(tp=2, pp=2), 1, False),
    "pp2-dp2": (Layout(pp=2, dp=2), 1, True),
    "tp2-pp2-encoder4": (Layout(tp=2, pp=2), 4, True),
    "cp2-pp2-encoder2": (Layout(cp=2, pp=2), 2, True),
}


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", CASES)
def test_units_come_and_gradients_return(name, split):
    decoder, tp, everywhere = CASES[name]
    counted = run_ranks(
        there_and_back,
        decoder.world_size,
        decoder=decoder,
        tp=tp,
        everywhere=everywhere,
        split=split,
        timeout=120.0,
    )
    sent, needed = (sum(column) for column in zip(*counted, strict=True))
    assert sent == needed > 0


@pytest.mark.quick
@pytest.mark.parametrize(
    ("units", "replicas", "lots"),
    [
        (range(0), 1, []),
        (range(4, 20), 1, [16]),
        (range(4, 44), 2, [16, 16, 8]),
        (range(64), 24, [24, 24, 16]),
    ],
)
def test_sixteen_units_go_over_at_a_time_or_one_of_each_replica(units, replicas, lots):
    owners = [unit % replicas for unit in range(64)]
    spec = ExchangeSpec(
        tokens=(1,) * 64,
        shares=tuple((Share(encoder_replica=each),) for each in owners),
        width=WIDTH,
        dtype=torch.float32,
    )
    found = [*spec.lots(units)]
    assert [*chain(*found)] == [*units]
    assert [*map(len, found)] == lots


@st.composite
def routed(draw):
    """An edge, and of some units the replicas that have shares."""
    placement, _, rank = draw(placements())
    edge = placement.edge(ENCODER.name, rank=rank)
    encoder_replica = st.integers(0, len(edge.replicas) - 1)
    several = st.lists(encoder_replica, min_size=1, max_size=3, unique=True).map(tuple)
    return edge, tuple(draw(st.lists(several, max_size=9)))


def moves(make, edge, encoder_replicas):
    """Of all ranks; each share of a unit has a row."""
    units = ExchangeSpec(
        tokens=tuple(map(len, encoder_replicas)),
        shares=tuple(
            tuple(
                Share(encoder_replica=each, rows=(slice(n, n + 1),))
                for n, each in enumerate(several)
            )
            for several in encoder_replicas
        ),
        width=1,
        dtype=torch.float32,
    )
    return dict.fromkeys(each for rank in edge.ranks for each in make(edge, units, rank=rank))


@pytest.mark.quick
@FEW
@given(routed())
def test_the_ranks_of_a_group_share_the_sending(made):
    """Of one unit, no rank of the owning group serves more than one other rank above another."""
    edge, encoder_replicas = made
    found = moves(feature_moves, *made)
    shares = [(unit, each) for unit, several in enumerate(encoder_replicas) for each in several]
    for unit, encoder_replica in shares:
        replica = edge.replicas[encoder_replica]
        if set(replica) & set(edge.consumers):
            continue
        sent = Counter(each.source for each in found if each.piece == unit)
        counts = [sent[rank] for rank in replica]
        assert max(counts) - min(counts) <= 1


@pytest.mark.quick
@FEW
@given(placements())
def test_consumers_share_the_encoder_s_ranks(made):
    """Each of these has its gradients of one consumer, and all consumers have as many of them."""
    placement, _, rank = made
    edge = placement.edge(ENCODER.name, rank=rank)
    later = tuple(
        number
        for number, replica in enumerate(edge.replicas)
        if not set(replica) & set(edge.consumers)
    )
    found = moves(gradient_moves, edge, (later,) * 3)
    pairs = {(each.source, each.target) for each in found}
    assert len(pairs) == sum(len(edge.replicas[number]) for number in later)
    counts = [sum(source == consumer for source, _ in pairs) for consumer in edge.consumers]
    assert max(counts) - min(counts) <= 1


@st.composite
def visual_places(draw):
    """Where the visual tokens of some rows lie, and how the sequence is split: cp, and tp of it."""
    cp, tp = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    length = cp * tp * draw(st.integers(1, 6))
    rows = draw(st.lists(st.sets(st.integers(0, length - 1)), max_size=4))
    split = TokenSplit.whole(length) if cp == 1 else zigzag(length, cp=cp)
    return [np.array(sorted(row), dtype=np.int64) for row in rows], split, tp


@pytest.mark.quick
@settings(max_examples=60, deadline=None)
@given(visual_places())
def test_each_part_gets_the_tokens_that_lie_in_it_in_their_order(made):
    places, split, tp = made
    shards = sequence_shards(places, split=split, tp=tp)
    assert len(shards) == len(split.parts) * tp
    position = np.concatenate([np.zeros(0, dtype=np.int64), *places])
    for part, rows in enumerate(shards):
        # What the rank holds, place by place, and of that its chunk.
        held = np.split(split.parts[part // tp].places, tp)[part % tp]
        expected = np.isin(position, held).nonzero()[0].tolist()
        taken = [token for each in rows for token in range(each.start, each.stop)]
        assert taken == expected
        assert size(rows) == len(expected)
    # One run of rows for each row of the microbatch at most, and there two of a zigzag: they are
    # sent as such.
    stretches = max(len(part.starts) for part in split.parts)
    assert all(len(rows) <= len(places) * stretches for rows in shards)
