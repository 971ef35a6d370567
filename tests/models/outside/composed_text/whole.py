"""The configs of the wholes in the manner of transformers: a section for the decoder."""

from typing import ClassVar

from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.configuration_utils import SubConfigSpec


def _with(kind: str, decoder: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    class With(PreTrainedConfig):
        model_type = f"composed_{kind}"
        sub_configs_defaults: ClassVar = {"text_config": SubConfigSpec(config_class=decoder)}
        text_config: dict | PreTrainedConfig | None = None

    return With


WithLlama = _with("llama", LlamaConfig)
WithMistral = _with("mistral", MistralConfig)
WithQwen2 = _with("qwen2", Qwen2Config)
WithQwen3 = _with("qwen3", Qwen3Config)
WithQwen3Moe = _with("qwen3_moe", Qwen3MoeConfig)
