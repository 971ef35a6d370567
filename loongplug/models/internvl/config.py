"""Architecture of InternVL, module by module. YAML files fill these dataclasses."""

from dataclasses import dataclass
from typing import ClassVar

from loongplug.models.architecture import Encoding, TextArchitecture, VisionLanguageArchitecture
from loongplug.models.patch_transformer.config import InternVisionConfig
from loongplug.models.projectors.config import PixelShuffleConfig


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
