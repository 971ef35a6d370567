"""Qwen3-VL-MoE: logits, loss and every gradient against transformers, in every layout.

As in ``test_hf_agreement``; the gradients of experts are compared expert by expert.
"""

import pytest
import torch
from hf_batches import batch
from hf_models import Layout, reference_model
from hf_reference import Reference, assert_agrees, measured, reference, reference_step
from tiny_families import QWEN3_VL_MOE, SP

LAYOUTS = [
    Layout(),
    Layout(micro_batch_size=4),
    Layout(**SP),
    Layout(pp=2, **SP, micro_batch_size=2),
    Layout(pp=2, vpp=2, **SP),
    Layout(dp=2),  # each expert on two ranks
    Layout(dp=2, ep=2),
    Layout(dp=2, ep=2, dispatcher="allgather"),
    Layout(dp=4, ep=2, overlap_grad_reduce=True),
    Layout(dp=2, ep=2, **SP),  # experts as split as everything else
    Layout(**SP, etp=1),  # whole experts, on both ranks of the tensor parallel group
    Layout(**SP, etp=1, ep=2, dispatcher="allgather"),
    Layout(dp=2, **SP, etp=1, ep=2),
    Layout(dp=2, etp=2),  # experts more split than everything else
    Layout(pp=2, dp=2, ep=2, recompute=True),
    Layout(pp=2, vpp=2, dp=2, ep=2),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return reference(tmp_path_factory.mktemp("hf"), QWEN3_VL_MOE, batch())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_agrees_with_transformers(expected, layout):
    assert_agrees(expected, layout)


def test_every_expert_is_trained(expected):
    """Else the comparison would say little about it."""
    gradients = expected.step.gradients.items()
    experts = measured({name: grad for name, grad in gradients if ".mlp.experts." in name})
    assert len(experts) == 2 * 8 * 4
    assert all(gradient.abs().max() > 1e-6 for gradient in experts.values())


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """Routers that send all tokens to the first four of eight experts: ranks remain idle."""
    model = reference_model(QWEN3_VL_MOE)
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            gate = layer.mlp.gate
            direction = gate.weight[0].clone()
            gate.weight.zero_()
            for expert, factor in enumerate((1.0, 0.9, -0.9, -1.0)):
                gate.weight[expert] = factor * direction
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return Reference(QWEN3_VL_MOE, folder, batch(), reference_step(model, batch()))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp=2, ep=2),
        Layout(dp=2, ep=2, dispatcher="allgather"),
        Layout(dp=2, ep=2, **SP),
        Layout(**SP, etp=1, ep=2, overlap_grad_reduce=True),
    ],
    ids=str,
)
def test_experts_and_ranks_without_tokens(crowded, layout):
    idle = crowded.step.gradients["model.language_model.layers.1.mlp.experts.down_proj"][4:]
    assert idle.abs().max() == 0
    assert_agrees(crowded, layout)
