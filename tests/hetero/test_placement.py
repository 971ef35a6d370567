"""Which ranks encode: every rank of a replica has the same view, and it fits the groups made."""

import pytest
from hypothesis import given, settings
from placed import PLACES, decoders, placements

from loongplug.hetero.placement import all_ranks_dp, first_stage_dp, first_stage_tp
from loongplug.parallel.layout import Layout

pytestmark = pytest.mark.quick
FEW = settings(max_examples=30, deadline=None)


@FEW
@given(placements())
def test_consumers_are_the_first_stage_s_tensor_parallel_group(made):
    placement, decoder, rank = made
    mine = decoder.coordinates(rank)
    coordinates = [decoder.coordinates(each) for each in placement.consumers]
    assert [each.tp for each in coordinates] == list(range(decoder.tp))
    assert {(each.pp, each.dp, each.cp) for each in coordinates} == {(0, mine.dp, mine.cp)}


@FEW
@given(placements())
def test_all_ranks_of_a_replica_have_the_same_view(made):
    placement, decoder, rank = made
    places = (all_ranks_dp,) if placement.on_every_stage else (first_stage_tp, first_stage_dp)
    place = next(
        each for each in places if each(decoder, tp=placement.layout.tp, rank=rank) == placement
    )
    for other in decoder.group("tp_cp_pp", rank):
        assert place(decoder, tp=placement.layout.tp, rank=other) == placement


@FEW
@given(decoders())
def test_groups_of_the_modes(made):
    """Together: one group of all; in turn: the first stage's ranks; on all: the replica's."""
    decoder, tp = made
    for rank in decoder.ranks:
        replica = decoder.group("tp_cp_pp", rank)
        first = [each for each in replica if decoder.coordinates(each).pp == 0]
        assert first_stage_tp(decoder, tp=tp, rank=rank).groups == (tuple(first),)
        for place, encoding in ((first_stage_dp, first), (all_ranks_dp, replica)):
            groups = place(decoder, tp=tp, rank=rank).groups
            assert sorted(each for group in groups for each in group) == sorted(encoding)
            assert {len(group) for group in groups} == {tp}


@FEW
@given(decoders())
def test_a_group_is_one_replica_in_the_encoder_s_layout(made):
    """It differs in the tensor parallel coordinate only, from 0 on, as Megatron's group does."""
    decoder, tp = made
    for place in (first_stage_dp, all_ranks_dp):
        for rank in decoder.ranks:
            placement = place(decoder, tp=tp, rank=rank)
            for group in placement.groups:
                assert list(group) == placement.layout.group("tp", group[0])


@FEW
@given(decoders())
def test_every_encoder_replica_belongs_to_one_model_replica(made):
    """Nobody's unit is encoded by two, and no replica is idle because nobody counts it."""
    decoder, tp = made
    for place in (first_stage_dp, all_ranks_dp):
        of_ranks = [place(decoder, tp=tp, rank=rank) for rank in decoder.ranks]
        layout = of_ranks[0].layout
        assert all(each.layout == layout for each in of_ranks)
        assert layout.world_size == decoder.world_size
        distinct = {group for each in of_ranks for group in each.groups}
        encoding = [rank for group in distinct for rank in group]
        assert len(encoding) == len(set(encoding))
        on_first = [rank for rank in layout.ranks if layout.coordinates(rank).pp == 0]
        assert sorted(encoding) == on_first


@FEW
@given(decoders())
def test_the_sum_over_replicas_counts_each_unit_once(made):
    """``gradient_factor`` undoes how many replicas encode one unit, and nothing else."""
    decoder, tp = made
    for place in PLACES:
        placement = place(decoder, tp=tp, rank=0)
        replicas_of_a_unit = len(placement.groups[0]) / placement.layout.tp
        assert placement.gradient_factor * replicas_of_a_unit == 1.0
        assert placement.on_every_stage == (placement.layout.pp == 1 and place is all_ranks_dp)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tp", [0, 3, 12])
def test_a_size_that_does_not_divide(place, tp):
    with pytest.raises(ValueError, match=f"is {tp}: it has to divide the decoder's, which is 4"):
        place(Layout(tp=4, pp=2), tp=tp, rank=0)
