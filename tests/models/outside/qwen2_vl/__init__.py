"""Qwen2-VL as a family from outside the package: all of it is in this folder. Images only."""

from pathlib import Path

from loongplug.models.registry import QWEN_VISION_TOKENS, Family

FAMILY = Family(
    name="qwen2_vl",
    model_type="qwen2_vl",
    config_class="qwen2_vl.config:Qwen2VLConfig",
    builder="qwen2_vl.model:build_model",
    arguments="qwen2_vl.model:megatron_arguments",
    hugging_face="qwen2_vl.hf:hugging_face",
    special_tokens=QWEN_VISION_TOKENS,
    configs=Path(__file__).parent,
)

LOONGPLUG_FAMILIES = (FAMILY,)
