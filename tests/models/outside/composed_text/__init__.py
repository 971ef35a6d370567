"""Families that are data alone: Qwen2.5-VL's encoder before each of the decoders of text."""

from composed_text.config import (
    ComposedLlamaConfig,
    ComposedMistralConfig,
    ComposedQwen2Config,
    ComposedQwen3Config,
    ComposedQwen3MoeConfig,
)
from loongplug.models.family import QWEN_VISION_TOKENS, Family, InTransformers

LOONGPLUG_FAMILIES = tuple(
    Family(
        name=f"composed_{kind}",
        config_class=config_class,
        parts={
            "image_encoder": "qwen2_5_vit",
            "image_projector": "qwen2_5_merger",
            "text_decoder": f"{kind}_text",
        },
        in_transformers=InTransformers(
            config_class=f"composed_text.whole:{whole}",
            architecture="Composed",  # transformers has no such model
            roots={
                "image_encoder": "visual",
                "image_projector": "visual",
                "text_decoder": "model",
            },
            sections={"text_config": ("text_decoder",)},
        ),
        special_tokens=QWEN_VISION_TOKENS,
    )
    for kind, config_class, whole in (
        ("llama", ComposedLlamaConfig, "WithLlama"),
        ("mistral", ComposedMistralConfig, "WithMistral"),
        ("qwen2", ComposedQwen2Config, "WithQwen2"),
        ("qwen3", ComposedQwen3Config, "WithQwen3"),
        ("qwen3_moe", ComposedQwen3MoeConfig, "WithQwen3Moe"),
    )
)
