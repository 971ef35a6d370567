"""Architecture of LLaVA-1.5, module by module. YAML files fill these dataclasses."""

from dataclasses import dataclass
from typing import ClassVar

from loongplug.models.architecture import (
    Encoding,
    SquareVisionArchitecture,
    TextArchitecture,
    VisionLanguageArchitecture,
)
from loongplug.models.projectors.config import MlpConfig


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
