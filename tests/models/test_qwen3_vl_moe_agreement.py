"""Qwen3-VL-MoE: logits, loss and every gradient against transformers, in every layout.

As in ``test_hf_agreement``; the gradients of experts are compared expert by expert.
"""

import pytest
from hf_batches import TOKEN_IDS, batch
from hf_reference import Layout, assert_agreement, reference_model, reference_step

from loongplug.models.qwen3_vl.config import Qwen3ProjectorConfig, Qwen3VisionConfig
from loongplug.models.qwen3_vl_moe.config import Qwen3MoeDecoderConfig, Qwen3VLMoeConfig

SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = [
    Layout(),
    Layout(micro_batch_size=4),
    Layout(**SP),
    Layout(pp=2, **SP, micro_batch_size=2),
    Layout(pp=2, vpp=2),
    Layout(pp=2, vpp=2, **SP),
    Layout(dp=2),  # each expert on two ranks
    Layout(dp=2, ep=2),
    Layout(dp=2, ep=2, dispatcher="allgather"),
    Layout(dp=4, ep=2, overlap_grad_reduce=True),
    Layout(dp=2, ep=2, **SP),  # experts as split as everything else
    Layout(dp=2, ep=2, **SP, dispatcher="allgather"),
    Layout(**SP, etp=1),  # whole experts, on both ranks of the tensor parallel group
    Layout(**SP, etp=1, ep=2),
    Layout(**SP, etp=1, ep=2, dispatcher="allgather"),
    Layout(dp=2, **SP, etp=1, ep=2),
    Layout(dp=2, etp=2),  # experts more split than everything else
    Layout(pp=2, dp=2, ep=2, recompute=True),
    Layout(pp=2, vpp=2, dp=2, ep=2),
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
