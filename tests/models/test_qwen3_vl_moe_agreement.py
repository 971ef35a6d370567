"""Experts and ranks without tokens, against transformers: logits, loss and every gradient."""

import pytest
import torch
from hf_batches import batch
from hf_models import Layout, reference_model
from hf_reference import Reference, assert_agrees, reference_step
from tiny_families import QWEN3_VL_MOE, SP


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
