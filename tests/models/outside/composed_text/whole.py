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


class WithLlama(PreTrainedConfig):
    """With Llama's decoder."""

    model_type = "composed_llama"
    sub_configs_defaults: ClassVar = {"text_config": SubConfigSpec(config_class=LlamaConfig)}
    text_config: dict | PreTrainedConfig | None = None


class WithMistral(PreTrainedConfig):
    """With Mistral's."""

    model_type = "composed_mistral"
    sub_configs_defaults: ClassVar = {"text_config": SubConfigSpec(config_class=MistralConfig)}
    text_config: dict | PreTrainedConfig | None = None


class WithQwen2(PreTrainedConfig):
    """With Qwen2's."""

    model_type = "composed_qwen2"
    sub_configs_defaults: ClassVar = {"text_config": SubConfigSpec(config_class=Qwen2Config)}
    text_config: dict | PreTrainedConfig | None = None


class WithQwen3(PreTrainedConfig):
    """With Qwen3's."""

    model_type = "composed_qwen3"
    sub_configs_defaults: ClassVar = {"text_config": SubConfigSpec(config_class=Qwen3Config)}
    text_config: dict | PreTrainedConfig | None = None


class WithQwen3Moe(PreTrainedConfig):
    """With Qwen3's and experts."""

    model_type = "composed_qwen3_moe"
    sub_configs_defaults: ClassVar = {"text_config": SubConfigSpec(config_class=Qwen3MoeConfig)}
    text_config: dict | PreTrainedConfig | None = None
