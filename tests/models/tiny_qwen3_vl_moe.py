"""A tiny Qwen3-VL-MoE for the family's tests, and what the one without experts has of it."""

from typing import Any

from hf_batches import TOKEN_IDS

from loongplug.models.qwen3_vl.config import Qwen3ProjectorConfig, Qwen3VisionConfig
from loongplug.models.qwen3_vl_moe.config import Qwen3MoeDecoderConfig, Qwen3VLMoeConfig

SP = {"tp": 2, "sequence_parallel": True}


VISION = Qwen3VisionConfig(
    num_layers=3,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_position_embeddings=64,
    deepstack_layers=(0, 1, 2),
)
TEXT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 32,
    "vocab_size": 128,
    "mrope_section": (6, 5, 5),
}


def architecture() -> Qwen3VLMoeConfig:
    """Small, but with every feature: GQA, deepstack over three layers, more experts than ranks."""
    return Qwen3VLMoeConfig(
        image_encoder=VISION,
        image_projector=Qwen3ProjectorConfig(),
        foundation=Qwen3MoeDecoderConfig(
            **TEXT, num_experts=8, experts_per_token=2, expert_ffn_hidden_size=48
        ),
        **TOKEN_IDS,
    )
