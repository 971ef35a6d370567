"""A family that is data alone: one family's encoder before another's decoder."""

from dataclasses import dataclass

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.family import QWEN_VISION_TOKENS, Family, InTransformers
from loongplug.models.qwen2_5_vl import Qwen25ProjectorConfig, Qwen25VisionConfig
from loongplug.models.qwen3_vl_moe import Qwen3MoeDecoderConfig


@dataclass(frozen=True, kw_only=True)
class ComposedConfig(VisionLanguageArchitecture):
    """Qwen2.5-VL's encoder before Qwen3-VL-MoE's decoder."""

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
            roots={"image_encoder": "visual", "image_projector": "visual", "text_decoder": "model"},
            sections={},
        ),
        special_tokens=QWEN_VISION_TOKENS,
    ),
)
