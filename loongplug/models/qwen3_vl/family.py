"""Qwen3-VL (dense) in the registry."""

from loongplug.models.registry import QWEN_VISION_TOKENS, Family

FAMILY = Family(
    name="qwen3_vl",
    model_type="qwen3_vl",
    config_class="loongplug.models.qwen3_vl.config:Qwen3VLConfig",
    builder="loongplug.models.qwen3_vl.model:build_model",
    arguments="loongplug.models.qwen3_vl.arguments:megatron_arguments",
    hugging_face="loongplug.models.qwen3_vl.hf:hugging_face",
    special_tokens=QWEN_VISION_TOKENS,
)
