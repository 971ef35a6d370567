"""Which rank holds which tokens."""

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from drawn_rows import LENGTHS, RANKS, SPLITS, split_row
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.utils import get_batch_on_this_cp_rank

from loongplug.context.token_split import ContextShard, zigzag


@pytest.mark.quick
@given(LENGTHS, RANKS, SPLITS)
def test_each_token_is_in_one_part_and_parts_are_equally_long_and_ascend(
    lengths: list[int], cp: int, how: str | int
) -> None:
    split, _ = split_row(lengths, cp=cp, how=how)
    assert len(split.parts) == cp
    assert len({part.tokens for part in split.parts}) == 1
    for part in split.parts:
        assert (np.diff(part.places) > 0).all()
        assert (part.starts[1:] > part.stops[:-1]).all()  # stretches that touch are one
    assert sorted(split.order.tolist()) == list(range(split.length))
    assert 0 <= split.length - sum(lengths) < cp


@given(LENGTHS, RANKS, SPLITS, st.data())
def test_tokens_before_a_place_are_counted(
    lengths: list[int], cp: int, how: str | int, data: st.DataObject
) -> None:
    split, _ = split_row(lengths, cp=cp, how=how)
    part = data.draw(st.sampled_from(split.parts))
    places = np.arange(split.length + 1)
    assert (part.before(places) == (part.places < places[:, None]).sum(1)).all()
    assert (part.holds(places) == np.isin(places, part.places)).all()


@pytest.mark.parametrize(("tokens", "cp"), [(8, 1), (24, 2), (24, 3), (56, 7)])
def test_zigzag_is_megatrons_where_chunks_are_equal(tokens: int, cp: int) -> None:
    split = zigzag(tokens, cp=cp)
    for rank, part in enumerate(split.parts):
        batch = {"tokens": torch.arange(tokens)[None], "cu_seqlens": None}
        group = SimpleNamespace(size=lambda: cp, rank=lambda rank=rank: rank)
        with (
            patch("torch.distributed.get_rank", return_value=rank),
            patch("torch.distributed.get_world_size", return_value=cp),
        ):
            theirs = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
        assert part.places.tolist() == theirs["tokens"][0].tolist()


@pytest.mark.parametrize("cp", [2, 3, 7])
@pytest.mark.parametrize("tokens", [1, 5, 6, 45])
def test_zigzag_gives_a_causal_row_evenly_to_all_ranks(cp: int, tokens: int) -> None:
    split = zigzag(tokens, cp=cp)
    pairs = [int((part.places + 1).sum()) for part in split.parts]
    # Where a rank's tokens are odd in number, one more of them lies behind than before.
    each = split.parts[0].tokens
    assert max(pairs) - min(pairs) == (each % 2) * each * (cp - 1)


def test_a_row_of_fewer_tokens_than_ranks_leaves_some_only_padding() -> None:
    split = zigzag(2, cp=7)
    assert split.length == 7
    assert sum(part.places[0] >= 2 for part in split.parts) == 5


def test_stretches_that_touch_become_one_and_empty_ones_go() -> None:
    part = ContextShard.of(np.array([0, 2, 4, 7]), np.array([2, 2, 6, 9]))
    assert part.starts.tolist() == [0, 4, 7]
    part = ContextShard.of(np.array([0, 2, 7]), np.array([2, 4, 9]))
    assert (part.starts.tolist(), part.stops.tolist()) == ([0, 7], [4, 9])
