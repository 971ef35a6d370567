"""Qwen2.5-VL in the registry."""

from loongplug.models.registry import QWEN_VISION_TOKENS, Family

FAMILY = Family(
    name="qwen2_5_vl",
    model_type="qwen2_5_vl",
    config_class="loongplug.models.qwen2_5_vl.config:Qwen25VLConfig",
    builder="loongplug.models.qwen2_5_vl.model:build_model",
    arguments="loongplug.models.qwen2_5_vl.arguments:megatron_arguments",
    hugging_face="loongplug.models.qwen2_5_vl.hf:hugging_face",
    special_tokens=QWEN_VISION_TOKENS,
)
