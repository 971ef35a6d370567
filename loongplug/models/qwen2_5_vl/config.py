"""Architecture of a Qwen2.5-VL model, module by module. YAML files fill these dataclasses."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from loongplug.models.architecture import (
    MultimodalTextArchitecture,
    ProjectorArchitecture,
    RotaryVisionArchitecture,
    VisionLanguageArchitecture,
)

if TYPE_CHECKING:
    from loongplug.data.video import VideoStyle


@dataclass(frozen=True, kw_only=True)
class Qwen25VisionConfig(RotaryVisionArchitecture):
    """The ViT: 3D patch embedding, 2D rope, RMSNorm, SwiGLU, window attention in most layers."""

    mlp_matrices: ClassVar[int] = 3
    full_attention_layers: tuple[int, ...]  # 0-based; all others attend within windows
    patch_size: int = 14
    window_size: int = 112  # a window's side in pixels
    tokens_per_second: int = 2  # time positions that a second of video takes

    @property
    def window_tokens(self) -> int:
        """A window's side in merged tokens."""
        return self.window_size // (self.patch_size * self.spatial_merge_size)

    def attention_window(self, layer: int) -> int | None:
        """Whole frames in the full attention layers, windows in all others."""
        whole = layer in self.full_attention_layers
        return None if whole else self.window_tokens * self.spatial_merge_size


@dataclass(frozen=True, kw_only=True)
class Qwen25ProjectorConfig(ProjectorArchitecture):
    """The patch merger with RMSNorm; its sizes follow its neighbours."""


@dataclass(frozen=True, kw_only=True)
class Qwen25DecoderConfig(MultimodalTextArchitecture):
    """The text decoder: GQA with biases on q, k and v, RMSNorm, SwiGLU, mRoPE in sections."""

    interleaved_mrope: ClassVar[bool] = False
    rotary_base: float = 1_000_000.0
    max_position_embeddings: int = 128_000


@dataclass(frozen=True, kw_only=True)
class Qwen25VLConfig(VisionLanguageArchitecture):
    """A whole Qwen2.5-VL: encoder, projector, decoder, and the ids of its special tokens."""

    image_encoder: Qwen25VisionConfig
    image_projector: Qwen25ProjectorConfig
    foundation: Qwen25DecoderConfig

    def video_style(self) -> "VideoStyle":
        """A video is one block of tokens, whose time axis counts seconds."""
        from loongplug.data.video import VideoStyle

        return VideoStyle(timestamps=False, tokens_per_second=self.image_encoder.tokens_per_second)
