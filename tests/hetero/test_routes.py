"""Who sends what to whom: all that is needed, once, by all ranks alike."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import ENCODER, placements

from loongplug.hetero.placement import all_ranks_dp
from loongplug.hetero.routes import feature_transfers, gradient_transfers

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


def shares(encoder_replicas):
    return [(unit, each) for unit, several in enumerate(encoder_replicas) for each in several]


@FEW
@given(routed())
def test_a_rank_that_has_it_sends_to_itself(made):
    edge, encoder_replicas = made
    for each in feature_transfers(edge, encoder_replicas):
        has = each.target in edge.replicas[each.encoder_replica]
        assert (each.source == each.target) == has
    for each in gradient_transfers(edge, encoder_replicas):
        assert (each.source == each.target) == (each.target in edge.consumers)


@FEW
@given(routed())
def test_the_ranks_of_a_group_share_the_sending(made):
    """Of one unit, no rank of the owning group serves more than one other rank above another."""
    edge, encoder_replicas = made
    transfers = feature_transfers(edge, encoder_replicas)
    for share in shares(encoder_replicas):
        replica = edge.replicas[share[1]]
        if set(replica) & set(edge.consumers):
            continue
        sent = Counter(
            each.source for each in transfers if (each.unit, each.encoder_replica) == share
        )
        counts = [sent[rank] for rank in replica]
        assert max(counts) - min(counts) <= 1


@FEW
@given(placements([all_ranks_dp]), st.integers(1, 3))
def test_the_consumers_share_the_gradients_of_later_stages(made, rounds):
    """With as many units for each group: each consumer sends as many as another, but for one
    a round."""
    placement, decoder, rank = made
    edge = placement.edge(ENCODER.name, rank=rank)
    encoder_replicas = [(each,) for each in range(len(edge.replicas))] * rounds
    sent = Counter(
        each.source
        for each in gradient_transfers(edge, encoder_replicas)
        if each.source != each.target
    )
    counts = [sent[rank] for rank in edge.consumers]
    assert max(counts) - min(counts) <= rounds
    assert sum(counts) == rounds * decoder.tp * decoder.cp * (decoder.pp - 1)


@FEW
@given(routed(), st.data())
def test_split_sequences_take_each_parts_rows_there_and_back(made, data):
    """Features to all ranks of every part, a gradient from one rank of each."""
    edge, encoder_replicas = made
    consumers = len(edge.consumers)
    sizes = [each for each in range(2, consumers + 1) if consumers % each == 0]
    if not sizes:
        return
    parts = data.draw(st.sampled_from(sizes))
    part_of = {rank: n * parts // consumers for n, rank in enumerate(edge.consumers)}
    there = feature_transfers(edge, encoder_replicas, parts=parts)
    assert all(part_of[each.target] == each.shard for each in there)
    expected = [(*share, rank) for share in shares(encoder_replicas) for rank in edge.consumers]
    found = [(each.unit, each.encoder_replica, each.target) for each in there]
    assert sorted(found) == sorted(expected)
    back = gradient_transfers(edge, encoder_replicas, parts=parts)
    assert all(part_of[each.source] == each.shard for each in back)
    expected = [
        (unit, encoder_replica, rank, shard)
        for unit, encoder_replica in shares(encoder_replicas)
        for rank in edge.replicas[encoder_replica]
        for shard in range(parts)
    ]
    found = [(each.unit, each.encoder_replica, each.target, each.shard) for each in back]
    assert sorted(found) == sorted(expected)
    for each in back:  # what is here already is not sent
        if part_of.get(each.target) == each.shard:
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
    pairs = {(each.source, each.target) for each in gradient_transfers(edge, (later,) * 3)}
    assert len(pairs) == sum(len(edge.replicas[number]) for number in later)
    counts = [sum(source == consumer for source, _ in pairs) for consumer in edge.consumers]
    assert max(counts) - min(counts) <= 1
