"""What the YAML of these families may say."""

from dataclasses import dataclass

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.qwen2_5_vl.config import Qwen25ProjectorConfig, Qwen25VisionConfig
from loongplug.models.text_decoders.config import (
    LlamaTextConfig,
    MistralTextConfig,
    Qwen2TextConfig,
    Qwen3MoeTextConfig,
    Qwen3TextConfig,
)


@dataclass(frozen=True, kw_only=True)
class _ComposedConfig(VisionLanguageArchitecture):
    image_encoder: Qwen25VisionConfig
    image_projector: Qwen25ProjectorConfig


@dataclass(frozen=True, kw_only=True)
class ComposedLlamaConfig(_ComposedConfig):
    """With Llama's decoder."""

    foundation: LlamaTextConfig


@dataclass(frozen=True, kw_only=True)
class ComposedMistralConfig(_ComposedConfig):
    """With Mistral's."""

    foundation: MistralTextConfig


@dataclass(frozen=True, kw_only=True)
class ComposedQwen2Config(_ComposedConfig):
    """With Qwen2's."""

    foundation: Qwen2TextConfig


@dataclass(frozen=True, kw_only=True)
class ComposedQwen3Config(_ComposedConfig):
    """With Qwen3's."""

    foundation: Qwen3TextConfig


@dataclass(frozen=True, kw_only=True)
class ComposedQwen3MoeConfig(_ComposedConfig):
    """With Qwen3's and experts."""

    foundation: Qwen3MoeTextConfig
