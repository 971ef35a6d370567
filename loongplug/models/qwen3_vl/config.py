"""Architecture of a Qwen3-VL model, module by module. YAML files fill these dataclasses."""

from dataclasses import dataclass
from typing import ClassVar

from loongplug.models.architecture import (
    MultimodalTextArchitecture,
    ProjectorArchitecture,
    RotaryVisionArchitecture,
    VisionLanguageArchitecture,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig(RotaryVisionArchitecture):
    """The ViT: 3D patch embedding, interpolated position table, 2D rope, LayerNorm, GELU MLP."""

    num_position_embeddings: int  # a square number: the learned grid
    patch_size: int = 16
    deepstack_layers: tuple[int, ...] = ()  # 0-based layers whose output is tapped

    def taps(self) -> tuple[int, ...]:
        """Its ``deepstack_layers``."""
        return self.deepstack_layers


@dataclass(frozen=True, kw_only=True)
class Qwen3ProjectorConfig(ProjectorArchitecture):
    """The patch merger and one deepstack merger per tapped layer; sizes follow its neighbours."""


@dataclass(frozen=True, kw_only=True)
class Qwen3DecoderConfig(MultimodalTextArchitecture):
    """The text decoder: GQA with q/k norm, RMSNorm, SwiGLU, interleaved mRoPE."""

    interleaved_mrope: ClassVar[bool] = True
    rotary_base: float = 5_000_000.0
    max_position_embeddings: int = 262_144


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(VisionLanguageArchitecture):
    """A whole Qwen3-VL: encoder, projector, decoder, and the ids of its special tokens."""

    image_encoder: Qwen3VisionConfig
    image_projector: Qwen3ProjectorConfig
    foundation: Qwen3DecoderConfig
