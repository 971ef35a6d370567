"""The InternVL family: InternViT-300M, a pixel shuffle, any text decoder, as ``transformers`` joins
them in InternVL 3.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from loongplug.models.architecture import Encoding, TextArchitecture, VisionLanguageArchitecture
from loongplug.models.family import ANY, Family, InTransformers
from loongplug.models.llava import LLAVA_FILES
from loongplug.models.patch_transformer import InternVisionConfig
from loongplug.models.projectors import PixelShuffleConfig


@dataclass(frozen=True, kw_only=True)
class InternVLConfig(VisionLanguageArchitecture):
    """InternViT, a pixel shuffle and a text decoder; which one, its ``_target_`` says.

    InternVL 3 itself has Qwen2.5.
    """

    plain_positions: ClassVar[bool] = True
    encoders: ClassVar[dict[str, Encoding]] = {
        "image_encoder": Encoding(projector="image_projector", media=("image",))
    }
    image_encoder: InternVisionConfig
    image_projector: PixelShuffleConfig
    foundation: TextArchitecture


def side_of_blocks(found: Any) -> dict[str, dict[str, Any]]:
    """The side of the blocks of patches that become tokens; config.json has its inverse."""
    return {"image_encoder": {"spatial_merge_size": round(1 / found.downsample_ratio)}}


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
            derived="loongplug.models.internvl:side_of_blocks",
        ),
        special_tokens={"image_token_id": "<IMG_CONTEXT>"},
    ),
)
