"""Decoders of text alone, with plain rope, for families of any encoder: their config classes and
Hugging Face names.
"""

from loongplug.models.parts import SOFTMAX_ROUTING, TEXT_JSON, DecoderPart
from loongplug.models.text_decoders.config import (
    LlamaTextConfig,
    MistralTextConfig,
    Qwen2TextConfig,
    Qwen3MoeTextConfig,
    Qwen3TextConfig,
)

_HF = "loongplug.models.text_decoders.hf"

LOONGPLUG_PARTS = (
    DecoderPart(
        name="llama_text",
        model_type="llama",
        config_class=LlamaTextConfig,
        hugging_face=f"{_HF}:llama",
        config_json=TEXT_JSON | {"kv_channels": "head_dim"},
        derived=f"{_HF}:scaling",
        fixed={"qk_layernorm": False, "add_qkv_bias": False},
    ),
    DecoderPart(
        name="mistral_text",
        model_type="mistral",
        config_class=MistralTextConfig,
        hugging_face=f"{_HF}:mistral",
        config_json=TEXT_JSON | {"kv_channels": "head_dim", "sliding_window": "sliding_window"},
        derived=f"{_HF}:scaling",
        fixed={"qk_layernorm": False, "add_qkv_bias": False},
    ),
    DecoderPart(
        name="qwen2_text",
        model_type="qwen2",
        config_class=Qwen2TextConfig,
        hugging_face=f"{_HF}:qwen2",
        config_json=TEXT_JSON,
        derived=f"{_HF}:head_and_scaling",
        fixed={"qk_layernorm": False, "add_qkv_bias": True},
    ),
    DecoderPart(
        name="qwen3_text",
        model_type="qwen3",
        config_class=Qwen3TextConfig,
        hugging_face=f"{_HF}:qwen3",
        config_json=TEXT_JSON | {"kv_channels": "head_dim"},
        derived=f"{_HF}:scaling",
        fixed={"qk_layernorm": True, "add_qkv_bias": False},
    ),
    DecoderPart(
        name="qwen3_moe_text",
        model_type="qwen3_moe",
        config_class=Qwen3MoeTextConfig,
        hugging_face=f"{_HF}:qwen3_moe",
        config_json=TEXT_JSON
        | {
            "num_experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_ffn_hidden_size": "moe_intermediate_size",
        },
        derived=f"{_HF}:head_and_scaling",
        unused=("intermediate_size",),  # no layer has a dense MLP
        fixed=SOFTMAX_ROUTING
        | {
            "qk_layernorm": True,
            "add_qkv_bias": False,
            "moe_shared_expert_intermediate_size": None,
        },
        keys={
            "num_experts": "num_experts",
            "moe_router_topk": "experts_per_token",
            "moe_ffn_hidden_size": "expert_ffn_hidden_size",
        },
    ),
)
