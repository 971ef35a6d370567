"""What the YAML of these families may say."""

from dataclasses import dataclass, make_dataclass

from loongplug.models.architecture import TextArchitecture, VisionLanguageArchitecture
from loongplug.models.qwen2_5_vl import Qwen25ProjectorConfig, Qwen25VisionConfig
from loongplug.models.text_decoders import (
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


def _with(name: str, decoder: type[TextArchitecture]) -> type[_ComposedConfig]:
    return make_dataclass(
        f"Composed{name}Config",
        [("foundation", decoder)],
        bases=(_ComposedConfig,),
        frozen=True,
        kw_only=True,
        module=__name__,
    )


ComposedLlamaConfig = _with("Llama", LlamaTextConfig)
ComposedMistralConfig = _with("Mistral", MistralTextConfig)
ComposedQwen2Config = _with("Qwen2", Qwen2TextConfig)
ComposedQwen3Config = _with("Qwen3", Qwen3TextConfig)
ComposedQwen3MoeConfig = _with("Qwen3Moe", Qwen3MoeTextConfig)
