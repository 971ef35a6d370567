"""A family that is data alone: Qwen2.5-VL's encoder before Qwen3-VL-MoE's decoder."""

from dataclasses import dataclass

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.qwen2_5_vl.config import Qwen25ProjectorConfig, Qwen25VisionConfig
from loongplug.models.qwen3_vl_moe.config import Qwen3MoeDecoderConfig
from loongplug.models.registry import QWEN_VISION_TOKENS, Family, InTransformers


@dataclass(frozen=True, kw_only=True)
class ComposedConfig(VisionLanguageArchitecture):
    """The whole model."""

    image_encoder: Qwen25VisionConfig
    image_projector: Qwen25ProjectorConfig
    foundation: Qwen3MoeDecoderConfig


LOONGPLUG_FAMILIES = (
    Family(
        name="composed_vl",
        config_class=ComposedConfig,
        parts={
            "image_encoder": "qwen2_5_vit",
            "image_projector": "qwen2_5_merger",
            "text_decoder": "qwen3_moe",
        },
        in_transformers=InTransformers(
            config_class=None,  # transformers has no such model
            architecture="Composed",
            roots={
                "image_encoder": "visual",
                "image_projector": "visual",
                "text_decoder": "model",
            },
            sections={},
        ),
        special_tokens=QWEN_VISION_TOKENS,
    ),
)
