"""Architecture of a Qwen2-VL model. YAML files fill these dataclasses."""

from dataclasses import dataclass
from typing import ClassVar

from loongplug.models.architecture import (
    MultimodalTextArchitecture,
    ProjectorArchitecture,
    RotaryVisionArchitecture,
    VisionLanguageArchitecture,
)


@dataclass(frozen=True, kw_only=True)
class Qwen2VisionConfig(RotaryVisionArchitecture):
    """The ViT: 3D patch embedding without bias, 2D rope, LayerNorm, MLP with a quick GELU."""

    patch_size: int = 14


@dataclass(frozen=True, kw_only=True)
class Qwen2DecoderConfig(MultimodalTextArchitecture):
    """The text decoder: GQA with biases on q, k and v, RMSNorm, SwiGLU, mRoPE in sections."""

    interleaved_mrope: ClassVar[bool] = False
    rotary_base: float = 1_000_000.0
    max_position_embeddings: int = 32_768


@dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(VisionLanguageArchitecture):
    """A whole Qwen2-VL: encoder, projector, decoder, and the ids of its special tokens."""

    image_encoder: Qwen2VisionConfig
    image_projector: ProjectorArchitecture
    foundation: Qwen2DecoderConfig
