"""Media in the order of their frames' lengths, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loongplug.models.layers.packed import PackedLayout
from loongplug.models.patch_grids import frame_lengths
from loongplug.models.patch_order import by_frame_length

pytestmark = pytest.mark.quick

# [media, 3]: time, height, width in patches.
grids = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from((2, 4, 6)), st.sampled_from((2, 4))),
    min_size=1,
    max_size=8,
).map(torch.tensor)


def tagged(grid_thw: Tensor) -> Tensor:
    """Patches that say which medium they are of, its grid, and their number in it, [patches, 5]."""
    return torch.cat(
        [
            torch.tensor(
                [[float(number), *grid, place] for place in range(torch.tensor(grid).prod())]
            )
            for number, grid in enumerate(grid_thw.tolist())
        ]
    )


@settings(deadline=None)
@given(grids)
def test_every_medium_moves_as_a_whole_with_its_grid(grid_thw: Tensor) -> None:
    order = by_frame_length(grid_thw)
    patches = tagged(grid_thw)
    put = order.put(patches)
    start = 0
    for grid in order.grids.tolist():
        own = put[start : start + torch.tensor(grid).prod()]
        assert own[:, 1:4].unique(dim=0).tolist() == [grid]
        assert own[:, 0].unique().numel() == 1
        assert own[:, 4].tolist() == list(range(len(own)))
        start += len(own)
    assert start == len(patches)
    assert sorted(put[:, 0].unique().tolist()) == list(range(len(grid_thw)))
    assert order.put_back(put).equal(patches)


@settings(deadline=None)
@given(grids)
def test_frames_of_one_length_stand_together(grid_thw: Tensor) -> None:
    before = PackedLayout.of(frame_lengths(grid_thw))
    order = by_frame_length(grid_thw)
    assert PackedLayout.of(frame_lengths(order.grids)).by_length
    assert (order.order is None) == before.by_length


def test_a_gradient_goes_back_to_its_own_patch() -> None:
    order = by_frame_length(torch.tensor([[1, 2, 2], [1, 4, 4], [2, 2, 2]]))
    assert order.order is not None
    patches = torch.randn(28, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(order.put, patches)
    assert torch.autograd.gradcheck(order.put_back, patches)
    weights = torch.randn(28, 3, dtype=torch.float64)
    (order.put(patches) * order.put(weights)).sum().backward()
    assert patches.grad is not None
    assert patches.grad.equal(weights)
