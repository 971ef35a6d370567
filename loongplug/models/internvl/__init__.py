"""The InternVL family: InternViT-300M, a pixel shuffle, any text decoder, as ``transformers`` joins
them in InternVL 3.
"""

from types import MappingProxyType

from loongplug.models.internvl.config import InternVLConfig
from loongplug.models.llava import LLAVA_FILES
from loongplug.models.registry import ANY, Family, InTransformers

LOONGPLUG_FAMILIES = (
    Family(
        name="internvl",
        config_class=InternVLConfig,
        parts={
            "image_encoder": "intern_vit",
            "image_projector": "pixel_shuffle",
            "text_decoder": ANY,
        },
        in_transformers=InTransformers(
            config_class="InternVLConfig",
            architecture="InternVLForConditionalGeneration",
            **LLAVA_FILES,
            derived="loongplug.models.llava.hf:side_of_blocks",
        ),
        special_tokens=MappingProxyType({"image_token_id": "<IMG_CONTEXT>"}),
    ),
)
