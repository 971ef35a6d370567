"""The Megatron arguments that a Qwen3-VL config decides: those of its text decoder."""

from loongplug.models.decoder_arguments import decoder_arguments
from loongplug.models.qwen3_vl.config import Qwen3VLConfig
from loongplug.models.registry import ArchitectureArgument


def megatron_arguments(model: Qwen3VLConfig) -> dict[str, ArchitectureArgument]:
    """The decoder's architecture under the names of Megatron's namespace."""
    return decoder_arguments(model.foundation, fixed={"qk_layernorm": True, "add_qkv_bias": False})
