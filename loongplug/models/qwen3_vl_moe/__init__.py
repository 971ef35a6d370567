"""The Qwen3-VL-MoE family: Qwen3-VL with experts in place of the decoder's MLPs. Here is that
decoder; encoder and projector are those of the dense family.
"""

from loongplug.models.parts import MULTIMODAL_TEXT_JSON, SOFTMAX_ROUTING, DecoderPart
from loongplug.models.qwen3_vl_moe.config import Qwen3MoeDecoderConfig, Qwen3VLMoeConfig
from loongplug.models.registry import QWEN_VISION_TOKENS, Family, InTransformers

LOONGPLUG_PARTS = (
    DecoderPart(
        name="qwen3_moe",
        config_class=Qwen3MoeDecoderConfig,
        hugging_face="loongplug.models.qwen3_vl_moe.hf:decoder",
        config_json=MULTIMODAL_TEXT_JSON
        | {
            "kv_channels": "head_dim",
            "num_experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_ffn_hidden_size": "moe_intermediate_size",
        },
        unused=("intermediate_size",),  # no layer has a dense MLP
        fixed=SOFTMAX_ROUTING | {"qk_layernorm": True, "add_qkv_bias": False},
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
