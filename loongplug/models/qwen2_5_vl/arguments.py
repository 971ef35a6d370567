"""The Megatron arguments that a Qwen2.5-VL config decides: those of its text decoder."""

from loongplug.models.decoder_arguments import decoder_arguments
from loongplug.models.qwen2_5_vl.config import Qwen25VLConfig
from loongplug.models.registry import ArchitectureArgument


def megatron_arguments(model: Qwen25VLConfig) -> dict[str, ArchitectureArgument]:
    """The decoder's architecture under the names of Megatron's namespace."""
    return decoder_arguments(model.foundation, fixed={"qk_layernorm": False, "add_qkv_bias": True})
