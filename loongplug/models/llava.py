"""The LLaVA family: any encoder of square images, an MLP, any text decoder, as ``transformers``
joins them in LLaVA-1.5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from loongplug.models.architecture import (
    Encoding,
    SquareVisionArchitecture,
    TextArchitecture,
    VisionLanguageArchitecture,
)
from loongplug.models.family import ANY, WHOLE, Family, InTransformers
from loongplug.models.projectors import MlpConfig


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(VisionLanguageArchitecture):
    """An encoder of square images, an MLP and a text decoder; which ones, ``_target_`` says.

    LLaVA-1.5 itself has CLIP and Llama.
    """

    plain_positions: ClassVar[bool] = True
    encoders: ClassVar[dict[str, Encoding]] = {
        "image_encoder": Encoding(projector="image_projector", media=("image",))
    }
    image_encoder: SquareVisionArchitecture
    image_projector: MlpConfig
    foundation: TextArchitecture


def whole(model: VisionLanguageArchitecture) -> dict[str, Any]:
    """Keys of a whole model's config.json that no field has: whether a first token, which only a
    class token is, is dropped, and how many tokens an image has.
    """
    encoder = model.image_encoder
    assert isinstance(encoder, SquareVisionArchitecture)
    return {
        "vision_feature_select_strategy": "default" if encoder.has_class_token() else "full",
        "image_seq_length": (encoder.side // encoder.spatial_merge_size) ** 2,
    }


# What files of LLaVA, and of the models that transformers made like it, have in common: what
# tensors are called there, and where config.json says what.
LLAVA_FILES: Mapping[str, Any] = {
    "roots": {
        "image_encoder": "vision_tower",
        "image_projector": "multi_modal_projector",
        "text_decoder": "language_model.model",
    },
    "head": "language_model.lm_head.weight",
    "prefixes": (
        ("language_model.lm_head", "lm_head"),
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ),
    "sections": {
        "vision_config": ("image_encoder",),
        "text_config": ("text_decoder",),
        WHOLE: ("image_projector",),
    },
    "whole": {"image_encoder": {"feature_layer": "vision_feature_layer"}},
    "more": "loongplug.models.llava:whole",
}

LOONGPLUG_FAMILIES = (
    Family(
        name="llava",
        config_class=LlavaConfig,
        parts={"image_encoder": ANY, "image_projector": "mlp", "text_decoder": ANY},
        in_transformers=InTransformers(
            config_class="LlavaConfig",
            architecture="LlavaForConditionalGeneration",
            **LLAVA_FILES,
            formerly=(("vision_tower.vision_model.", "vision_tower."),),
        ),
        special_tokens={"image_token_id": "<image>"},
    ),
)
