"""The Megatron arguments that a Qwen3-VL-MoE config decides: those of its text decoder."""

from loongplug.models.decoder_arguments import decoder_arguments
from loongplug.models.qwen3_vl_moe.config import Qwen3VLMoeConfig
from loongplug.models.registry import ArchitectureArgument

# How a token's experts are found: softmax over all, the k highest, made to sum to 1. Megatron gets
# the same from a softmax over the k highest logits, which is its order without "pre softmax".
_FIXED: dict[str, object] = {
    "qk_layernorm": True,
    "add_qkv_bias": False,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "moe_mlp_glu_interleave_size": None,
    "moe_use_upcycling": False,
}


def megatron_arguments(model: Qwen3VLMoeConfig) -> dict[str, ArchitectureArgument]:
    """The decoder's architecture under the names of Megatron's namespace."""
    decoder = model.foundation
    return decoder_arguments(
        decoder,
        fixed=_FIXED,
        by_key={
            "num_experts": ("num_experts", decoder.num_experts),
            "moe_router_topk": ("experts_per_token", decoder.experts_per_token),
            "moe_ffn_hidden_size": ("expert_ffn_hidden_size", decoder.expert_ffn_hidden_size),
            "moe_shared_expert_intermediate_size": (
                "shared_expert_ffn_hidden_size",
                decoder.shared_expert_ffn_hidden_size,
            ),
        },
    )
