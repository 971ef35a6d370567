"""Qwen3-VL-MoE: logits, loss and every gradient against transformers, in every layout.

As in ``test_hf_agreement``; experts' gradients are compared expert by expert as well, since the
largest of them all could hide another's error.
"""

import pytest
import torch
from hf_batches import TOKEN_IDS, batch
from hf_reference import (
    LIMIT,
    Layout,
    Step,
    assert_agreement,
    reference_model,
    reference_step,
)

from loongplug.models.qwen3_vl.config import Qwen3ProjectorConfig, Qwen3VisionConfig
from loongplug.models.qwen3_vl_moe.config import Qwen3MoeDecoderConfig, Qwen3VLMoeConfig

SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = [
    Layout(),
    Layout(micro_batch_size=4),
    Layout(**SP),
    Layout(pp=2, **SP),
    Layout(pp=2, vpp=2),
    Layout(dp=2, ep=2),
    Layout(dp=2, ep=2, **SP),
    Layout(**SP, dispatcher="allgather"),
]


def architecture() -> Qwen3VLMoeConfig:
    """Small, but with every feature: GQA, deepstack over three layers, more experts than ranks."""
    return Qwen3VLMoeConfig(
        image_encoder=Qwen3VisionConfig(
            num_layers=3,
            hidden_size=64,
            ffn_hidden_size=96,
            num_attention_heads=4,
            num_position_embeddings=64,
            deepstack_layers=(0, 1, 2),
        ),
        image_projector=Qwen3ProjectorConfig(),
        foundation=Qwen3MoeDecoderConfig(
            num_layers=4,
            hidden_size=64,
            ffn_hidden_size=160,
            num_experts=8,
            experts_per_token=2,
            expert_ffn_hidden_size=48,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=32,
            vocab_size=128,
            mrope_section=(6, 5, 5),
        ),
        **TOKEN_IDS,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    model = reference_model(architecture())
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return folder, reference_step(model, batch())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_agrees_with_transformers(reference, layout):
    folder, expected = reference
    assert_agreement(architecture(), folder, layout=layout, data=batch(), expected=expected)
