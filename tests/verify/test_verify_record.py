"""The seams that a recorder looks through, and what it makes of them."""

import pytest
import torch

from loongplug.models.hf_mapping import Source
from loongplug.verify.step_recorder import least_room
from loongplug.verify.weights import random_tensor

pytestmark = pytest.mark.quick


def test_random_weights_are_nowhere_at_0_or_1_and_differ_from_each_other():
    norm, bias = Source("a.norm.weight", (64,)), Source("a.norm.bias", (64,))
    assert abs(random_tensor(norm, seed=0).mean().item() - 1.0) < 0.1
    assert abs(random_tensor(bias, seed=0).mean().item()) < 0.1
    assert random_tensor(norm, seed=0).std().item() > 0.05
    inputs = Source("up", (3, 16, 64), experts=True, transposed=True)
    outputs = Source("down", (64, 16))
    for source in (inputs, outputs):
        assert abs(random_tensor(source, seed=0).std().item() - 0.25) < 0.03  # 1 / sqrt(16 inputs)
    assert not torch.equal(random_tensor(norm, seed=0), random_tensor(norm, seed=1))
    assert torch.equal(random_tensor(norm, seed=1), random_tensor(norm, seed=1))


def test_a_step_before_the_first_gradient_does_not_count_as_room():
    """A late expert's rounding would be measured against nothing, and its real errors as well."""
    steps = torch.tensor([[0.0, 0.0, 4.0, 9.0], [0.0, 1.0, 1.0, 16.0], [0.0, 4.0, 0.0, 1.0]])
    room = None
    for moment in steps:
        room = least_room(room, moment, eps=1e-8)
    assert room.tolist() == pytest.approx([1e-8, 1.0, 1e-8, 1.0])
    ours = torch.optim.Adam([weight := torch.nn.Parameter(torch.ones(2))], lr=0.1)
    weight.grad = torch.tensor([0.0, 1.0])
    ours.step()
    assert weight[0] == 1.0  # nothing moves where no gradient has come
