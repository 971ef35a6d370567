"""The Qwen3-VL-MoE family: Qwen3-VL with experts in place of the decoder's MLPs. Here is that
decoder; encoder and projector are those of the dense family.
"""

from loongplug.models.parts import TEXT_JSON, DecoderPart
from loongplug.models.qwen3_vl_moe.config import Qwen3MoeDecoderConfig, Qwen3VLMoeConfig
from loongplug.models.registry import QWEN_VISION_TOKENS, Family, InTransformers

LOONGPLUG_PARTS = (
    DecoderPart(
        name="qwen3_moe",
        config_class=Qwen3MoeDecoderConfig,
        hugging_face="loongplug.models.qwen3_vl_moe.hf:decoder",
        config_json=TEXT_JSON
        | {
            "kv_channels": "head_dim",
            "num_experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_ffn_hidden_size": "moe_intermediate_size",
        },
        unused=("intermediate_size",),  # no layer has a dense MLP
        # How a token's experts are found: softmax over all, the k highest, made to sum to 1.
        # Megatron gets the same from a softmax over the k highest logits, which is its order
        # without "pre softmax".
        fixed={
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
        },
        keys={
            "num_experts": "num_experts",
            "moe_router_topk": "experts_per_token",
            "moe_ffn_hidden_size": "expert_ffn_hidden_size",
            "moe_shared_expert_intermediate_size": "shared_expert_ffn_hidden_size",
        },
    ),
)

LOONGPLUG_FAMILIES = (
    Family(
        name="qwen3_vl_moe",
        config_class=Qwen3VLMoeConfig,
        parts={
            "image_encoder": "qwen3_vit",
            "image_projector": "qwen3_merger",
            "text_decoder": "qwen3_moe",
        },
        in_transformers=InTransformers(
            config_class="Qwen3VLMoeConfig",
            architecture="Qwen3VLMoeForConditionalGeneration",
            roots={
                "image_encoder": "model.visual",
                "image_projector": "model.visual",
                "text_decoder": "model.language_model",
            },
        ),
        special_tokens=QWEN_VISION_TOKENS,
    ),
)
