"""Decoders of text alone, with plain rope, for families of any encoder: config classes, names of
tensors and keys of config.json.

A family puts images before them as before any decoder; of the three axes of positions they use the
first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from loongplug.models.architecture import TextArchitecture
from loongplug.models.family import HuggingFacePart
from loongplug.models.hf_mapping import Row, Split
from loongplug.models.hf_rows import Table, head_size, text_decoder
from loongplug.models.parts import SOFTMAX_ROUTING, TEXT_JSON, DecoderPart
from loongplug.models.rope_settings import Llama3Scaling, RopeSettings

_LLAMA3, _DYNAMIC = "llama3", "dynamic"
_ODD = (
    "foundation.hidden_size is {}, but transformers' LlamaConfig asks for a multiple of "
    "num_attention_heads {}; only a model with that can be exchanged with it"
)


@dataclass(frozen=True, kw_only=True)
class PlainTextConfig(TextArchitecture):
    """A decoder with plain rope; ``rope_scaling`` is for models of longer texts.

    With ``dynamic_rope_factor``, transformers slows the turns down in texts that are longer than
    ``max_position_embeddings``; such rows are refused, all others are as without it. Fixed for a
    kind: biases on q, k and v, norms of q and k, and what config.json ``says`` besides its fields.
    """

    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    says: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    rope_scaling: Llama3Scaling | None = None
    dynamic_rope_factor: float | None = None

    def rope(self) -> RopeSettings:
        """The settings with the scaling."""
        return replace(super().rope(), scaling=self.rope_scaling)


@dataclass(frozen=True, kw_only=True)
class LlamaTextConfig(PlainTextConfig):
    """Llama's: GQA without biases, RMSNorm, SwiGLU."""

    says: ClassVar = {"attention_bias": False, "mlp_bias": False}


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

    qkv_bias: ClassVar = True
    says: ClassVar = {"use_sliding_window": False}


@dataclass(frozen=True, kw_only=True)
class Qwen3TextConfig(PlainTextConfig):
    """Qwen3's: as Llama's, with norms of q and k."""

    qk_norm: ClassVar = True
    says: ClassVar = {"attention_bias": False, "use_sliding_window": False}


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeTextConfig(PlainTextConfig):
    """Qwen3's with experts in every layer.

    ``ffn_hidden_size`` is the width of a dense MLP, which no layer has: it only stands in
    config.json.
    """

    qk_norm: ClassVar = True
    says: ClassVar = {
        **Qwen3TextConfig.says,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    num_experts: int
    experts_per_token: int
    expert_ffn_hidden_size: int


def tensors(text: PlainTextConfig, **names: Any) -> HuggingFacePart:
    """The decoder, of any kind."""
    mlps = partial(_expert_rows, text) if isinstance(text, Qwen3MoeTextConfig) else None
    heads, values = text.num_attention_heads, dict(text.says)
    odd = isinstance(text, LlamaTextConfig) and text.hidden_size % heads
    # A head's channels, where they are not what transformers takes when nothing is said.
    if (mlps or text.qkv_bias) and text.kv_channels * heads != text.hidden_size:
        values["head_dim"] = text.kv_channels
    return text_decoder(
        text,
        qkv_bias=text.qkv_bias,
        qk_norm=text.qk_norm,
        mlps=mlps,
        rope=_rope(text),
        values=values,
        inexpressible=(_ODD.format(text.hidden_size, heads),) if odd else (),
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
_HEAD = {"kv_channels": "head_dim"}
_EXPERTS = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn_hidden_size": "moe_intermediate_size",
}


def _part(
    kind: str,
    config_class: type[PlainTextConfig],
    config_json: dict[str, str],
    *,
    fixed: Mapping[str, object] = MappingProxyType({}),
    **more: Any,
) -> DecoderPart:
    """A decoder with these keys of ``config_json`` besides those of every decoder."""
    norm, bias = config_class.qk_norm, config_class.qkv_bias
    return DecoderPart(
        name=f"{kind}_text",
        model_type=kind,
        config_class=config_class,
        hugging_face=f"{_HF}:tensors",
        config_json=TEXT_JSON | config_json,
        derived=f"{_HF}:{'scaling' if 'kv_channels' in config_json else 'head_and_scaling'}",
        fixed={**fixed, "qk_layernorm": norm, "add_qkv_bias": bias},
        **more,
    )


LOONGPLUG_PARTS = (
    _part("llama", LlamaTextConfig, _HEAD),
    _part("mistral", MistralTextConfig, _HEAD | {"sliding_window": "sliding_window"}),
    _part("qwen2", Qwen2TextConfig, {}),
    _part("qwen3", Qwen3TextConfig, _HEAD),
    _part(
        "qwen3_moe",
        Qwen3MoeTextConfig,
        _EXPERTS,
        fixed=SOFTMAX_ROUTING | {"moe_shared_expert_intermediate_size": None},
        unused=("intermediate_size",),  # no layer has a dense MLP
        keys={
            "num_experts": "num_experts",
            "moe_router_topk": "experts_per_token",
            "moe_ffn_hidden_size": "expert_ffn_hidden_size",
        },
    ),
)
