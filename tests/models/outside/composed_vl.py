"""Families that are data alone: encoders of two families before decoders of Qwen3-VL's kind."""

from dataclasses import dataclass

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.family import QWEN_VISION_TOKENS, Family, InTransformers
from loongplug.models.patch_transformer import InternVisionConfig
from loongplug.models.projectors import PixelShuffleConfig
from loongplug.models.qwen2_5_vl import Qwen25ProjectorConfig, Qwen25VisionConfig
from loongplug.models.qwen3_vl import Qwen3DecoderConfig
from loongplug.models.qwen3_vl_moe import Qwen3MoeDecoderConfig


@dataclass(frozen=True, kw_only=True)
class ComposedConfig(VisionLanguageArchitecture):
    """Qwen2.5-VL's encoder before Qwen3-VL-MoE's decoder."""

    image_encoder: Qwen25VisionConfig
    image_projector: Qwen25ProjectorConfig
    foundation: Qwen3MoeDecoderConfig


@dataclass(frozen=True, kw_only=True)
class PairedConfig(VisionLanguageArchitecture):
    """InternViT and a pixel shuffle before Qwen3-VL's decoder."""

    image_encoder: InternVisionConfig
    image_projector: PixelShuffleConfig
    foundation: Qwen3DecoderConfig


LOONGPLUG_FAMILIES = tuple(
    Family(
        name=name,
        config_class=config_class,
        parts=dict(zip(("image_encoder", "image_projector", "text_decoder"), parts, strict=True)),
        in_transformers=InTransformers(
            config_class=None,  # transformers has no such model
            architecture="Composed",
            roots={"image_encoder": eyes, "image_projector": bridge, "text_decoder": "model"},
            sections={},
        ),
        special_tokens=QWEN_VISION_TOKENS,
    )
    for name, config_class, parts, eyes, bridge in (
        (
            "composed_vl",
            ComposedConfig,
            ("qwen2_5_vit", "qwen2_5_merger", "qwen3_moe"),
            *("visual", "visual"),
        ),
        (
            "paired_vl",
            PairedConfig,
            ("intern_vit", "pixel_shuffle", "qwen3"),
            *("vision_tower", "multi_modal_projector"),
        ),
    )
)
