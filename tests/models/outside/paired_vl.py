"""A family that is data alone: InternViT and a pixel shuffle before Qwen3-VL's decoder."""

from dataclasses import dataclass

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.patch_transformer.config import InternVisionConfig
from loongplug.models.projectors.config import PixelShuffleConfig
from loongplug.models.qwen3_vl.config import Qwen3DecoderConfig
from loongplug.models.registry import QWEN_VISION_TOKENS, Family, InTransformers


@dataclass(frozen=True, kw_only=True)
class PairedConfig(VisionLanguageArchitecture):
    """The whole model."""

    image_encoder: InternVisionConfig
    image_projector: PixelShuffleConfig
    foundation: Qwen3DecoderConfig


LOONGPLUG_FAMILIES = (
    Family(
        name="paired_vl",
        config_class=PairedConfig,
        parts={
            "image_encoder": "intern_vit",
            "image_projector": "pixel_shuffle",
            "text_decoder": "qwen3",
        },
        in_transformers=InTransformers(
            config_class=None,  # transformers has no such model
            architecture="Paired",
            roots={
                "image_encoder": "vision_tower",
                "image_projector": "multi_modal_projector",
                "text_decoder": "model",
            },
            sections={},
        ),
        special_tokens=QWEN_VISION_TOKENS,
    ),
)
