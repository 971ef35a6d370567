"""Patch geometry against transformers' own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig as HfConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionRotaryEmbedding
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from loongplug.models.patch_grids import frame_lengths
from loongplug.models.qwen3_vl import vision as grids_module
from loongplug.models.qwen3_vl.vision import PackedGeometry

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")

grids = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)).map(
        lambda grid: [grid[0], 2 * grid[1], 2 * grid[2]]
    ),
    min_size=1,
    max_size=4,
)


def geometry(side: int = 8, **options: int) -> PackedGeometry:
    return PackedGeometry(side=side, head_dim=16, base=1e4, merge=2, **options)


@settings(deadline=None, max_examples=40)
@given(grid=grids, side=st.sampled_from([4, 8, 48]))
def test_position_taps_resample_the_table_as_transformers_does(grid, side):
    grid_thw = torch.tensor(grid)
    table = torch.randn(side * side, 5)
    taps, weights, _ = geometry(side).packed(grid_thw, CPU)
    rows, shares = get_vision_interpolation_indices_and_weights(
        grid_thw, side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    ours = (table[taps] * weights[:, :, None]).sum(1)
    theirs = (table[rows] * shares[:, :, None]).sum(1)
    # transformers computes the coordinates (up to 47) in float32: 47 * 2^-23, a few times over.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)


@settings(deadline=None, max_examples=40)
@given(grid=grids)
def test_rotary_angles_are_those_of_transformers(grid):
    grid_thw = torch.tensor(grid)
    vision = HfConfig().vision_config
    vision.hidden_size, vision.num_heads = 64, 4
    reference = Qwen3VLVisionRotaryEmbedding(vision)
    cos, sin = reference(torch.zeros(1), get_vision_position_ids(grid_thw, 2))
    _, _, angles = geometry().packed(grid_thw, CPU)
    angles = torch.cat([angles, angles], dim=1)
    torch.testing.assert_close(angles.cos(), cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(angles.sin(), sin, rtol=0, atol=1e-6)


def test_attention_stays_within_a_frame():
    assert frame_lengths(torch.tensor([[2, 2, 4], [1, 2, 2]])) == [8, 8, 4]


@pytest.mark.parametrize("cache_bytes", [0, 2000, 2**20])
def test_geometry_is_the_same_whatever_is_kept(cache_bytes):
    kept = geometry(cache_bytes=cache_bytes)
    for grid in ([[1, 4, 2], [2, 2, 4]], [[1, 4, 2]], [[1, 6, 6], [1, 4, 2]], [[1, 2, 4]]):
        ours, fresh = (each.packed(torch.tensor(grid), CPU) for each in (kept, geometry()))
        for one, other in zip(ours, fresh, strict=True):
            assert torch.equal(one, other)


def test_geometry_is_kept_up_to_so_many_bytes(monkeypatch):
    made = []

    def counted(height, width, **options):
        made.append((height, width))
        return original(height, width, **options)

    original = grids_module.frame_position_taps
    monkeypatch.setattr(grids_module, "frame_position_taps", counted)
    # A patch takes 4 * 8 + 4 * 4 + 8 * 4 = 80 bytes: room for two frames of 8 patches.
    kept = geometry(cache_bytes=1300)
    for height, width in [(2, 4), (4, 2), (2, 4), (2, 2), (2, 4), (4, 2)]:
        kept.packed(torch.tensor([[3, height, width]]), CPU)
    assert made == [(2, 4), (4, 2), (2, 2), (4, 2)]
