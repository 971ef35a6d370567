"""Decoders of text alone, with plain rope, for families of any encoder: config classes, names of
tensors and keys of config.json.

A family puts images before them as before any decoder; of the three axes of positions they use the
first.
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from loongplug.models.architecture import TextArchitecture
from loongplug.models.family import HuggingFacePart
from loongplug.models.hf_mapping import Row, Split
from loongplug.models.hf_rows import Table, head_size, text_decoder
from loongplug.models.parts import SOFTMAX_ROUTING, TEXT_JSON, DecoderPart
from loongplug.models.rope_settings import Llama3Scaling, RopeSettings

_LLAMA3, _DYNAMIC = "llama3", "dynamic"


@dataclass(frozen=True, kw_only=True)
class PlainTextConfig(TextArchitecture):
    """A decoder with plain rope; ``rope_scaling`` is for models of longer texts.

    With ``dynamic_rope_factor``, transformers slows the turns down in texts that are longer than
    ``max_position_embeddings``; such rows are refused, all others are as without it.
    """

    rope_scaling: Llama3Scaling | None = None
    dynamic_rope_factor: float | None = None

    def rope(self) -> RopeSettings:
        """The settings with the scaling."""
        return replace(super().rope(), scaling=self.rope_scaling)


@dataclass(frozen=True, kw_only=True)
class LlamaTextConfig(PlainTextConfig):
    """Llama's: GQA without biases, RMSNorm, SwiGLU."""


@dataclass(frozen=True, kw_only=True)
class MistralTextConfig(PlainTextConfig):
    """Mistral's, as Llama's.

    Up to ``sliding_window`` tokens attend to all before them, as they do with None; rows that are
    longer are refused.
    """

    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Qwen2TextConfig(PlainTextConfig):
    """Qwen2's and Qwen2.5's: as Llama's, with biases on q, k and v."""


@dataclass(frozen=True, kw_only=True)
class Qwen3TextConfig(PlainTextConfig):
    """Qwen3's: as Llama's, with norms of q and k."""


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeTextConfig(PlainTextConfig):
    """Qwen3's with experts in every layer.

    ``ffn_hidden_size`` is the width of a dense MLP, which no layer has: it only stands in
    config.json.
    """

    num_experts: int
    experts_per_token: int
    expert_ffn_hidden_size: int


def llama(text: LlamaTextConfig, **names: Any) -> HuggingFacePart:
    """Llama's decoder."""
    heads = text.num_attention_heads
    odd = (
        f"foundation.hidden_size is {text.hidden_size}, but transformers' LlamaConfig asks for "
        f"a multiple of num_attention_heads {heads}; only a model with that can be exchanged "
        "with it"
    )
    return text_decoder(
        text,
        rope=_rope(text),
        values={"attention_bias": False, "mlp_bias": False},
        inexpressible=(odd,) if text.hidden_size % heads else (),
        **names,
    )


def mistral(text: MistralTextConfig, **names: Any) -> HuggingFacePart:
    """Mistral's decoder."""
    return text_decoder(text, rope=_rope(text), **names)


def qwen2(text: Qwen2TextConfig, **names: Any) -> HuggingFacePart:
    """Qwen2's decoder."""
    values = _own_head(text) | {"use_sliding_window": False}
    return text_decoder(text, qkv_bias=True, rope=_rope(text), values=values, **names)


def qwen3(text: Qwen3TextConfig, **names: Any) -> HuggingFacePart:
    """Qwen3's decoder."""
    values = {"attention_bias": False, "use_sliding_window": False}
    return text_decoder(text, qk_norm=True, rope=_rope(text), values=values, **names)


def qwen3_moe(text: Qwen3MoeTextConfig, **names: Any) -> HuggingFacePart:
    """Qwen3's decoder with experts."""
    values = {
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    return text_decoder(
        text,
        qk_norm=True,
        mlps=partial(_expert_rows, text),
        rope=_rope(text),
        values=values | _own_head(text),
        **names,
    )


def scaling(text: Any) -> dict[str, Any]:
    """Rope's scaling, where config.json has one that is known here."""
    rope = text.rope_parameters
    if rope.get("rope_type") == _DYNAMIC:
        return {"dynamic_rope_factor": rope["factor"]}
    if rope.get("rope_type") != _LLAMA3:
        return {}
    return {"rope_scaling": {field.name: rope[field.name] for field in fields(Llama3Scaling)}}


def head_and_scaling(text: Any) -> dict[str, Any]:
    """Rope's scaling and a head's channels, of which not every config.json says something."""
    channels = getattr(text, "head_dim", None)
    head = head_size(text) if channels is None else {"kv_channels": channels}
    return head | scaling(text)


def _rope(text: PlainTextConfig) -> dict[str, Any]:
    """Values of config.json's section of rope, besides its base."""
    scaling, factor = text.rope_scaling, text.dynamic_rope_factor
    if factor is not None:
        return {"rope_type": _DYNAMIC, "factor": factor}
    return {} if scaling is None else {"rope_type": _LLAMA3, **vars(scaling)}


def _own_head(text: PlainTextConfig) -> dict[str, Any]:
    """A head's channels, where they are not what transformers takes when nothing is said."""
    filled = text.kv_channels * text.num_attention_heads == text.hidden_size
    return {} if filled else {"head_dim": text.kv_channels}


def _expert_rows(text: Qwen3MoeTextConfig, layer: Table) -> list[Row]:
    """Router and experts, whose tensors transformers stacks when it reads the files."""
    experts, hidden, ffn = text.num_experts, text.hidden_size, text.expert_ffn_hidden_size
    one = "mlp.experts.{expert}."
    fc1 = {f"{one}{each}_proj.weight": (ffn, hidden) for each in ("gate", "up")}
    fc2 = {f"{one}down_proj.weight": (hidden, ffn)}
    stacked = partial(layer.source, experts=True)
    gate_up = stacked("mlp.experts.gate_up_proj", (experts, 2 * ffn, hidden), parts=2)
    down = stacked("mlp.experts.down_proj", (experts, hidden, ffn))
    return [
        layer.row("mlp.router.weight", "mlp.gate.weight", (experts, hidden)),
        layer.experts("linear_fc1", fc1, split=Split.COLUMN, count=experts, in_model=(gate_up,)),
        layer.experts("linear_fc2", fc2, split=Split.ROW, count=experts, in_model=(down,)),
    ]


_HF = "loongplug.models.text_decoders"

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
