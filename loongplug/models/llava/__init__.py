"""The LLaVA family: any encoder of square images, an MLP, any text decoder, as ``transformers``
joins them in LLaVA-1.5.
"""

from types import MappingProxyType
from typing import Any

from loongplug.models.llava.config import LlavaConfig
from loongplug.models.registry import ANY, WHOLE, Family, InTransformers

# What files of LLaVA, and of the models that transformers made like it, have in common: what
# tensors are called there, and where config.json says what.
LLAVA_FILES: dict[str, Any] = {
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
    "more": "loongplug.models.llava.hf:whole",
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
        special_tokens=MappingProxyType({"image_token_id": "<image>"}),
    ),
)
