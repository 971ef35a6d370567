"""Qwen3-VL-MoE in the registry."""

from loongplug.models.registry import QWEN_VISION_TOKENS, Family

FAMILY = Family(
    name="qwen3_vl_moe",
    model_type="qwen3_vl_moe",
    config_class="loongplug.models.qwen3_vl_moe.config:Qwen3VLMoeConfig",
    builder="loongplug.models.qwen3_vl.model:build_model",
    arguments="loongplug.models.qwen3_vl_moe.arguments:megatron_arguments",
    hugging_face="loongplug.models.qwen3_vl_moe.hf:hugging_face",
    special_tokens=QWEN_VISION_TOKENS,
)
