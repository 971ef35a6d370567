"""Who sends what to whom: all that is needed, once, by all ranks alike."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import ENCODER, placements

from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.data.microbatch import Share
from loongplug.hetero.row_moves import (
    ExchangeSpec,
    feature_moves,
    gradient_moves,
    sequence_shards,
    size,
)

pytestmark = pytest.mark.quick
FEW = settings(max_examples=30, deadline=None)


@st.composite
def routed(draw):
    """An edge, and of some units the replicas that have shares."""
    placement, _, rank = draw(placements())
    edge = placement.edge(ENCODER.name, rank=rank)
    encoder_replica = st.integers(0, len(edge.replicas) - 1)
    several = st.lists(encoder_replica, min_size=1, max_size=3, unique=True).map(tuple)
    return edge, tuple(draw(st.lists(several, max_size=9)))


def moves(make, edge, encoder_replicas, parts=1):
    """Of all ranks; each share of a unit has a row in each part of the sequence."""
    rows = [range(len(several) * parts) for several in encoder_replicas]
    units = ExchangeSpec(
        tokens=tuple(map(len, rows)),
        shares=tuple(
            tuple(
                Share(encoder_replica=each, rows=(slice(n * parts, (n + 1) * parts),))
                for n, each in enumerate(several)
            )
            for several in encoder_replicas
        ),
        width=1,
        dtype=torch.float32,
        shards=tuple(
            tuple(tuple(slice(row, row + 1) for row in own[part::parts]) for part in range(parts))
            for own in rows
        ),
    )
    return dict.fromkeys(each for rank in edge.ranks for each in make(edge, units, rank=rank))


def shares(encoder_replicas):
    return [(unit, each) for unit, several in enumerate(encoder_replicas) for each in several]


@FEW
@given(routed())
def test_the_ranks_of_a_group_share_the_sending(made):
    """Of one unit, no rank of the owning group serves more than one other rank above another."""
    edge, encoder_replicas = made
    found = moves(feature_moves, *made)
    for unit, encoder_replica in shares(encoder_replicas):
        replica = edge.replicas[encoder_replica]
        if set(replica) & set(edge.consumers):
            continue
        sent = Counter(each.source for each in found if each.piece == unit)
        counts = [sent[rank] for rank in replica]
        assert max(counts) - min(counts) <= 1


@FEW
@given(routed(), st.data())
def test_sequences_take_each_parts_rows_there_and_back(made, data):
    """Features to all ranks of every part, a gradient from one rank of each.

    Whole ones are of one part. Who has it sends to itself.
    """
    edge, encoder_replicas = made
    consumers = len(edge.consumers)
    sizes = [each for each in range(1, consumers + 1) if consumers % each == 0]
    parts = data.draw(st.sampled_from(sizes))
    part_of = {rank: n * parts // consumers for n, rank in enumerate(edge.consumers)}

    def part(places):  # of a share's rows
        (one,) = places
        assert one.stop == one.start + 1
        return one.start

    there = moves(feature_moves, edge, encoder_replicas, parts)
    assert all(part_of[each.target] == part(each.given) for each in there)
    for each in there:
        here = edge.replica_of(each.source) == edge.replica_of(each.target)
        assert (each.source == each.target) == here
    expected = [(*share, rank) for share in shares(encoder_replicas) for rank in edge.consumers]
    found = [(each.piece, edge.replica_of(each.source), each.target) for each in there]
    assert sorted(found) == sorted(expected)
    back = moves(gradient_moves, edge, encoder_replicas, parts)
    assert all(part_of[each.source] == part(each.placed) for each in back)
    expected = [
        (unit, rank, shard)
        for unit, encoder_replica in shares(encoder_replicas)
        for rank in edge.replicas[encoder_replica]
        for shard in range(parts)
    ]
    assert sorted((each.piece, each.target, part(each.placed)) for each in back) == sorted(expected)
    for each in back:  # what is here already is not sent
        if part_of.get(each.target) == part(each.placed):
            assert each.source == each.target


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
