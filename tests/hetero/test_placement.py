"""Which ranks encode and consume, from the layouts of the whole world alone."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import ENCODER, PLACES, decoders, placements

from loongplug.data.planned_media import Assignment
from loongplug.hetero.placement import (
    Edge,
    all_ranks_dp,
    first_stage_dp,
    first_stage_tp,
)
from loongplug.parallel.layout import Layout

pytestmark = pytest.mark.quick
FEW = settings(max_examples=30, deadline=None)
NAME = ENCODER.name


@FEW
@given(placements())
def test_consumers_are_the_first_stage_s_ranks_part_after_part(made):
    """Those of one context parallel part are neighbours, by their tensor parallel coordinates."""
    placement, decoder, rank = made
    mine = decoder.coordinates(rank)
    consumers = placement.edge(NAME, rank=rank).consumers
    coordinates = [decoder.coordinates(each) for each in consumers]
    assert {(each.pp, each.dp) for each in coordinates} == {(0, mine.dp)}
    places = [(each.cp, each.tp) for each in coordinates]
    assert places == [*product(range(decoder.cp), range(decoder.tp))]
    for part, ranks in enumerate(placement.edge(NAME, rank=rank).parts(decoder.cp)):
        assert {decoder.coordinates(each).cp for each in ranks} == {part}


@FEW
@given(placements())
def test_every_rank_of_a_model_replica_has_its_edge(made):
    placement, decoder, _ = made
    edges = placement.edges(NAME)
    assert len(edges) == decoder.dp
    for number, ranks in enumerate(decoder.groups("tp_cp_pp")):
        assert {placement.edge(NAME, rank=each) for each in ranks} == {edges[number]}
        assert set(edges[number].ranks) <= set(ranks)
        encoding = {each for replica in edges[number].replicas for each in replica}
        assert {*edges[number].ranks} == {*edges[number].consumers} | encoding


@FEW
@given(decoders())
def test_encoder_replicas_of_the_modes(made):
    """TP: one of the first stage's ranks; DP: these apart; on all ranks: the whole replica's."""
    decoder, tp = made
    for rank in decoder.ranks:
        whole = decoder.group("tp_cp_pp", rank)
        first = [each for each in whole if decoder.coordinates(each).pp == 0]
        together = first_stage_tp(decoder, entry=ENCODER, tp=tp).edge(NAME, rank=rank)
        assert together == Edge(replicas=(tuple(first),), consumers=tuple(first))
        for place, encoding in ((first_stage_dp, first), (all_ranks_dp, whole)):
            placement = place(decoder, entry=ENCODER, tp=tp)
            replicas = placement.edge(NAME, rank=rank).replicas
            assert [each for ranks in replicas for each in ranks] == encoding
            assert [each for each in whole if placement.entry(NAME).holds(each)] == encoding
            assert {len(ranks) for ranks in replicas} == {tp}


@FEW
@given(placements())
def test_a_replica_is_a_tensor_parallel_group_of_the_encoder_s_layout(made):
    """It differs in the tensor parallel coordinate only, from 0 on, as Megatron's group does."""
    placement, _, rank = made
    entry = placement.entry(NAME)
    for ranks in placement.edge(NAME, rank=rank).replicas:
        for each in ranks:
            group = entry.layout.group("tp", each)
            assert set(group) <= set(ranks)
            assert entry.same_units or tuple(group) == ranks


@FEW
@given(placements(), st.integers(1, 9))
def test_the_sum_over_all_ranks_counts_each_unit_once(made, units):
    """Each tensor parallel group of the layout is one copy of the encoder, and adds its gradient
    of whatever it encodes: of each unit, copies x factor is 1. Context parallel ranks that all
    encode a unit have a part of its gradient each."""
    placement, decoder, _ = made
    layout = placement.entry(NAME).layout
    factor = placement.gradient_factor(NAME)
    for edge in placement.edges(NAME):
        assigned = Assignment(replicas=len(edge.replicas))
        for (share,) in assigned.of(range(units), [()] * units, step=units):
            encoding = edge.replicas[share.encoder_replica]
            copies = {tuple(layout.group("tp", rank)) for rank in encoding}
            assert set(encoding) == {rank for copy in copies for rank in copy}
            parts = decoder.cp if placement.entry(NAME).same_units else 1
            assert len(copies) * factor == parts
    assert len(placement.edges(NAME)) == decoder.dp


@FEW
@given(decoders())
def test_only_all_ranks_are_on_every_stage(made):
    decoder, tp = made
    for place in PLACES:
        everywhere = place(decoder, entry=ENCODER, tp=tp).on_every_stage(NAME)
        assert everywhere == (place is all_ranks_dp or decoder.pp == 1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tp", [0, 3, 12])
def test_a_size_that_does_not_divide(place, tp):
    with pytest.raises(ValueError, match=f"is {tp}: it has to divide the decoder's, which is 4"):
        place(Layout(tp=4, pp=2), entry=ENCODER, tp=tp)


@pytest.mark.parametrize(("tp", "own"), product((2, 4, 8), (1, 2, 4, 8)))
def test_all_of_a_group_are_met_by_as_many_replicas(tp: int, own: int) -> None:
    """Wherever the encoder lies, with as many ranks to a replica, or more, or fewer."""
    replicas = tuple(tuple(range(own * n, own * (n + 1))) for n in range(2 * max(tp, own)))
    for first in (0, 1000):  # the decoder's first stage, here or on ranks of its own
        edge = Edge(replicas=replicas, consumers=tuple(range(first, first + tp)))
        met = [edge.meetings(number, cp=1)[0][1] for number in range(len(replicas))]
        assert set(Counter(met).values()) == {len(replicas) // tp}
        own_rank = [
            rank for pair in (edge.meetings(n, cp=1)[0] for n in range(tp // own)) for rank in pair
        ]
        assert first or own_rank[::2] == own_rank[1::2], "a rank of the first stage meets itself"
