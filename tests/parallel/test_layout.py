"""Layout arithmetic against Megatron's own construction of groups."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state

from loongplug.parallel.layout import Layout, encoder_layout, encoder_sizes

pytestmark = pytest.mark.quick

# What Megatron calls the groups that it makes, and what a layout calls them.
KINDS = {
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "DATA_PARALLEL_GROUP": "dp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "tp_pp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp_ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp_ep_pp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
    # one instance of the distributed optimizer: everybody
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "etp_ep_edp_pp",
}


@st.composite
def layouts(draw: Any) -> Layout:
    """Any layout of up to 16 ranks, not all of which start at rank 0."""
    sizes, room = {}, 16
    for name in draw(st.permutations(["tp", "cp", "pp", "dp"])):
        sizes[name] = draw(st.integers(1, room))
        room //= sizes[name]
    stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    rest = stage // ep
    etp = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    return Layout(**sizes, ep=ep, etp=etp, first_rank=draw(st.integers(0, 5)))


@pytest.fixture(scope="module")
def _state_globals() -> Iterator[None]:
    before = dict(vars(parallel_state))
    yield
    vars(parallel_state).update(before)


def _groups_of_megatron(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All groups that ``initialize_model_parallel`` makes, by what it calls them."""
    made: dict[str, list[list[int]]] = {}

    def create_group(ranks: list[int], **options: Any) -> object:
        # torch.distributed orders a group's ranks, and Megatron counts on that once.
        made.setdefault(options["group_desc"], []).append(sorted(ranks))
        return object()

    parallel_state.destroy_model_parallel()
    with monkeypatch.context() as patch:
        patch.setattr(parallel_state, "create_group", create_group)
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_rank", lambda: layout.first_rank)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
            rank_offset=layout.first_rank,
            local_world_size=layout.world_size,
        )
    parallel_state.destroy_model_parallel()
    return made


@pytest.mark.usefixtures("_state_globals")
def test_all_groups_are_megatrons() -> None:
    @settings(max_examples=80, deadline=None)
    @given(layout=layouts())
    def check(layout: Layout) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = _groups_of_megatron(layout, monkeypatch)
        for name, kind in KINDS.items():
            assert layout.groups(kind) == made[name], kind
            for group in made[name]:
                assert all(layout.group(kind, rank) == group for rank in group)

    check()


@settings(max_examples=80, deadline=None)
@given(layout=layouts())
def test_coordinates_are_places_in_groups(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in layout.ranks]
    for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
        for rank, place in zip(layout.ranks, places, strict=True):
            assert layout.group(axis, rank)[getattr(place, axis)] == rank
    # No two ranks are in the same place of either grid.
    for axes in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
        assert len({tuple(asdict(p)[a] for a in axes) for p in places}) == layout.world_size


def test_a_stage_has_its_ranks_replica_by_replica() -> None:
    layout = Layout(tp=2, pp=3, dp=2, first_rank=4)
    assert layout.stage(0) == [[4, 5], [6, 7]]
    assert layout.stage(1) == [[8, 9], [10, 11]]
    assert layout.stage(-1) == layout.stage(2) == [[12, 13], [14, 15]]


def test_a_row_lies_in_a_shard_for_each_rank_that_holds_other_tokens() -> None:
    layout = Layout(tp=4, cp=3, pp=2, dp=5)
    assert layout.sequence_shards(sequence_parallel=False) == 3
    assert layout.sequence_shards(sequence_parallel=True) == 12


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": -1}, r"tp=-1, .* expected sizes of at least 1 and a rank of at least 0"),
        ({"first_rank": -1}, "first_rank=-1, "),
        ({"tp": 2, "order": (0, 0)}, r"the order \(0, 0\) is none of the ranks 0 to 1"),
        ({"tp": 2, "ep": 2}, "etp 2 x ep 2 must divide the 2 ranks of a pipeline stage"),
        ({"ep": 2, "pp": 2}, "must divide the 1 ranks"),
    ],
)
def test_bad_sizes(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**sizes)


@pytest.mark.parametrize("kind", ["tp_tp", "mp", "tp_etp"])
def test_bad_kinds(kind: str) -> None:
    with pytest.raises(ValueError, match="group kind"):
        Layout().groups(kind)
    with pytest.raises(ValueError, match="group kind"):
        Layout().group(kind, 0)


def test_a_rank_of_somebody_else() -> None:
    layout = Layout(tp=2, first_rank=4)
    for rank in (3, 6):
        with pytest.raises(ValueError, match="has ranks 4 to 5"):
            layout.coordinates(rank)
        with pytest.raises(ValueError, match=f"rank {rank} is none of this layout's"):
            layout.group("tp", rank)


@settings(max_examples=100, deadline=None)
@given(decoder=layouts(), data=st.data())
def test_an_encoder_cuts_the_decoders_groups_up(decoder: Layout, data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from([n for n in range(1, 17) if decoder.tp % n == 0]))
    on_first_stage = data.draw(st.booleans())
    encoder = encoder_layout(decoder, tp=tp, on_first_stage=on_first_stage)
    assert (encoder.tp, encoder.cp, encoder.pp, encoder.ep) == (tp, 1, 1, 1)
    on_stages = [0] if on_first_stage else range(decoder.pp)
    expected = [rank for rank in decoder.ranks if decoder.coordinates(rank).pp in on_stages]
    assert list(encoder.ranks) == expected
    for group in encoder.groups("tp"):
        assert set(group) <= set(decoder.group("tp", group[0]))
        # An encoder's slice is a function of the place in the decoder's slice.
        for rank in group:
            assert encoder.coordinates(rank).tp == decoder.coordinates(rank).tp % tp


@settings(max_examples=100, deadline=None)
@given(decoder=layouts(), data=st.data())
def test_an_encoder_on_whole_stages(decoder: Layout, data: st.DataObject) -> None:
    sizes = encoder_sizes(decoder, on_first_stage=False)
    assert sizes == sorted(set(sizes))
    wide = [size for size in sizes if size > decoder.tp]
    if not wide:
        return
    tp = data.draw(st.sampled_from(wide))
    assert tp % (decoder.tp * decoder.cp) == 0
    assert tp <= decoder.tp * decoder.cp * decoder.pp
    encoder = encoder_layout(decoder, tp=tp, on_first_stage=False)
    assert encoder.ranks == decoder.ranks
    for group in encoder.groups("tp"):
        # Of one replica, neighbours in it, and whole stages.
        together = decoder.group("tp_cp_pp", group[0])
        start = together.index(group[0])
        assert group == together[start : start + tp]
        for rank in group:
            assert set(decoder.group("tp_cp", rank)) <= set(group)
            assert encoder.group("tp", rank)[encoder.coordinates(rank).tp] == rank
    for group in encoder.groups("dp"):
        assert len({encoder.coordinates(rank).tp for rank in group}) == 1
        assert [encoder.coordinates(rank).dp for rank in group] == list(range(encoder.dp))


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), kind=st.sampled_from(sorted(KINDS.values())), data=st.data())
def test_an_order_gives_the_places_to_other_ranks(
    layout: Layout, kind: str, data: st.DataObject
) -> None:
    order = tuple(data.draw(st.permutations(layout.ranks)))
    ordered = replace(layout, order=order)
    places = dict(zip(layout.ranks, order, strict=True))
    expected = [sorted(places[rank] for rank in group) for group in layout.groups(kind)]
    assert ordered.groups(kind) == expected
    for rank in layout.ranks:
        assert ordered.coordinates(places[rank]) == layout.coordinates(rank)
        assert places[rank] in ordered.group(kind, places[rank])
        assert ordered.group(kind, places[rank]) in expected


def test_an_encoder_that_does_not_divide() -> None:
    for tp in (0, 3, 8):
        said = rf"tensor_model_parallel_size is {tp}.*YAML to one of \[1, 2, 4\]"
        with pytest.raises(ValueError, match=said):
            encoder_layout(Layout(tp=4, dp=2), tp=tp, on_first_stage=True)
    with pytest.raises(ValueError, match=r"or to fill whole stages.*YAML to one of \[1, 2, 4, 8\]"):
        encoder_layout(Layout(tp=4, pp=2), tp=3, on_first_stage=False)
