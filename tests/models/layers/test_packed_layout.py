"""The host's plan of a pack: which segments are computed together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams

from loongplug.models.layers.packed import PackedLayout, layout_of, pack_segments

pytestmark = pytest.mark.quick

lengths_of_packs = st.lists(st.integers(0, 7), max_size=20)


@given(lengths_of_packs)
def test_every_segment_with_tokens_is_in_the_one_group_of_its_length(lengths: list[int]) -> None:
    layout = PackedLayout.of(lengths)
    assert layout.lengths == tuple(lengths)
    assert layout.tokens == sum(lengths)
    planned = [(group.length, i) for group in layout.groups for i in group.segments]
    assert sorted(planned) == sorted((length, i) for i, length in enumerate(lengths) if length)
    assert len({group.length for group in layout.groups}) == len(layout.groups)
    assert all(list(group.segments) == sorted(group.segments) for group in layout.groups)


def test_groups_follow_their_first_segments() -> None:
    layout = PackedLayout.of([6, 0, 4, 6, 4, 9])
    assert [(g.length, g.segments) for g in layout.groups] == [
        (6, (0, 3)),
        (4, (2, 4)),
        (9, (5,)),
    ]


def test_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="Segment 1 of a pack has length -2"):
        PackedLayout.of([4, -2])


@given(lengths_of_packs)
def test_parameters_say_the_same_as_the_plan(lengths: list[int]) -> None:
    params = pack_segments(lengths, device="cpu")
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert params.cu_seqlens_kv is params.cu_seqlens_q
    assert params.max_seqlen_q == params.max_seqlen_kv == max(lengths, default=0)
    assert layout_of(params) == PackedLayout.of(lengths)


def test_padding_is_the_last_segment() -> None:
    params = pack_segments([3, 5], device="cpu", padding=4)
    assert params.padding == 4
    assert params.cu_seqlens_q.tolist() == [0, 3, 8, 12]
    assert layout_of(params).lengths == (3, 5, 4)
    full = pack_segments([3, 5], device="cpu", padding=0)
    assert layout_of(full).lengths == (3, 5)


@given(lengths_of_packs)
def test_plain_megatron_parameters_are_read_from_cu_seqlens(lengths: list[int]) -> None:
    ours = pack_segments(lengths, device="cpu")
    theirs = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ours.cu_seqlens_q,
        cu_seqlens_kv=ours.cu_seqlens_q.clone(),
    )
    assert layout_of(theirs) == PackedLayout.of(lengths)


def test_a_carried_plan_is_not_read_from_the_device_again() -> None:
    params = pack_segments([3, 5], device="cpu")
    params.cu_seqlens_q = params.cu_seqlens_kv = None
    assert layout_of(params) is params.layout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_format": "sbhd"}, "needs 'thd'"),
        ({"cu_seqlens_q_padded": torch.tensor([0, 8])}, "without padding"),
        ({"cu_seqlens_kv_padded": torch.tensor([0, 8])}, "without padding"),
        ({"cu_seqlens_kv": torch.tensor([0, 4])}, "must be the same"),
        ({"cu_seqlens_q": torch.tensor([1, 5])}, "must start with 0"),
        ({"cu_seqlens_q": torch.tensor([], dtype=torch.int32)}, "must start with 0"),
    ],
)
def test_foreign_parameters_that_mean_something_else_are_refused(
    changes: dict[str, object], message: str
) -> None:
    cu_seqlens = torch.tensor([0, 5])
    values = {"qkv_format": "thd", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    with pytest.raises(ValueError, match=message):
        layout_of(PackedSeqParams(**(values | changes)))
