"""Patch geometry against transformers' own: windows, angles in their order, position taps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig as HfConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionRotaryEmbedding
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from loongplug.models.qwen2_5_vl.vision import WindowGeometry, permute_blocks
from loongplug.models.qwen3_vl.vision import PackedGeometry

pytestmark = pytest.mark.quick

PATCH = 14
CPU = torch.device("cpu")
grids = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4
)


def geometry(side: int, merge: int) -> WindowGeometry:
    return WindowGeometry(side=side, head_dim=16, base=1e4, merge=merge)


@settings(deadline=None, max_examples=80)
@given(grid=grids, side=st.integers(1, 5), merge=st.sampled_from([1, 2, 3]))
def test_windows_are_those_of_transformers(grid, side, merge):
    grid_thw = torch.tensor([[time, merge * h, merge * w] for time, h, w in grid])
    plan = geometry(side, merge).plan(grid_thw, CPU)
    index, boundaries = get_vision_window_index(
        grid_thw, spatial_merge_size=merge, window_size=side * merge * PATCH, patch_size=PATCH
    )
    assert torch.equal(plan.order, index)
    assert list(plan.window_lengths) == boundaries.diff().tolist()
    frames, _ = get_vision_attention_seqlens(grid_thw, HfConfig().vision_config)
    assert list(plan.frame_lengths) == frames.diff().tolist()
    assert torch.equal(plan.order[plan.inverse], torch.arange(len(index)))


@settings(deadline=None, max_examples=40)
@given(grid=grids, side=st.integers(1, 5))
def test_angles_are_those_of_transformers_in_the_windows_order(grid, side):
    grid_thw = torch.tensor([[time, 2 * h, 2 * w] for time, h, w in grid])
    plan = geometry(side, 2).plan(grid_thw, CPU)
    vision = HfConfig().vision_config
    vision.hidden_size, vision.num_heads = 64, 4
    reference = Qwen2_5_VLVisionRotaryEmbedding(vision)
    tables = reference(torch.zeros(1), get_vision_position_ids(grid_thw, 2))
    index, _ = get_vision_window_index(
        grid_thw, spatial_merge_size=2, window_size=side * 2 * PATCH, patch_size=PATCH
    )
    angles = torch.cat([plan.angles, plan.angles], dim=1)
    for ours, table in zip((angles.cos(), angles.sin()), tables, strict=True):
        theirs = permute_blocks(table, index)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(grid=grids, side=st.sampled_from([4, 8, 48]))
def test_position_taps_resample_the_table_as_transformers_does(grid, side):
    grid_thw = torch.tensor([[time, 2 * h, 2 * w] for time, h, w in grid])
    table = torch.randn(side * side, 5)
    taps = PackedGeometry(side=side, head_dim=16, base=1e4, merge=2)
    places, weights, _ = taps.packed(grid_thw, CPU)
    rows, shares = get_vision_interpolation_indices_and_weights(
        grid_thw, side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    ours = (table[places] * weights[:, :, None]).sum(1)
    theirs = (table[rows] * shares[:, :, None]).sum(1)
    # transformers computes the coordinates (up to 47) in float32: 47 * 2^-23, a few times over.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)
