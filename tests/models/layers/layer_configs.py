"""Small configs for layer tests, as the models build them for machines without a GPU."""

from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

# What the layers ask of a ProcessGroupCollection when a rank is alone and sends nothing.
ALONE = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))

_COMMON: dict[str, Any] = {
    "num_layers": 1,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_dropout_fusion": False,
    "layernorm_epsilon": 1e-6,
}


def decoder_config(**overrides: Any) -> TransformerConfig:
    """GQA with q/k norm, RMSNorm and SwiGLU, no biases: a Qwen3 decoder layer."""
    values = _COMMON | {
        "hidden_size": 24,
        "ffn_hidden_size": 40,
        "num_query_groups": 2,
        "kv_channels": 8,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
    }
    return TransformerConfig(**(values | overrides))


def vision_config(**overrides: Any) -> TransformerConfig:
    """LayerNorm, GELU and biases: a ViT layer."""
    values = _COMMON | {
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "normalization": "LayerNorm",
        "activation_func": F.gelu,
        "add_bias_linear": True,
    }
    return TransformerConfig(**(values | overrides))
