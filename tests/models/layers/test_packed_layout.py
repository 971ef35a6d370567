"""The host's plan of a pack: which segments are computed together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loongplug.models.layers.inputs import PackedLayout, layout_of, pack_segments

pytestmark = pytest.mark.quick

lengths_of_packs = st.lists(st.integers(0, 7), max_size=20)


@given(lengths_of_packs)
def test_every_segment_with_tokens_is_in_the_one_group_of_its_length(lengths: list[int]) -> None:
    layout = PackedLayout.of(lengths)
    assert layout.lengths == tuple(lengths)
    assert layout.tokens == sum(lengths)
    planned = [(length, i) for length, found in layout.groups.items() for i in found]
    assert sorted(planned) == sorted((length, i) for i, length in enumerate(lengths) if length)
    assert all(found == sorted(found) for found in layout.groups.values())


def test_groups_follow_their_first_segments() -> None:
    layout = PackedLayout.of([6, 0, 4, 6, 4, 9])
    assert list(layout.groups.items()) == [(6, [0, 3]), (4, [2, 4]), (9, [5])]


@given(lengths_of_packs)
def test_parameters_say_the_same_as_the_plan(lengths: list[int]) -> None:
    params = pack_segments(lengths, device="cpu")
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert params.cu_seqlens_kv is params.cu_seqlens_q
    longest = max(lengths, default=0)
    assert params.max_seqlen_q == params.max_seqlen_kv
    assert longest <= params.max_seqlen_q < longest + 128
    assert params.max_seqlen_q % 128 == 0
    assert layout_of(params) == PackedLayout.of(lengths)


def test_padding_is_the_last_segment() -> None:
    params = pack_segments([3, 5], device="cpu", padding=4)
    assert params.padding == 4
    assert params.cu_seqlens_q.tolist() == [0, 3, 8, 12]
    assert layout_of(params).lengths == (3, 5, 4)
    full = pack_segments([3, 5], device="cpu", padding=0)
    assert layout_of(full).lengths == (3, 5)
