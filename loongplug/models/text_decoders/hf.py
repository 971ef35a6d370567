"""The decoders of text on the Hugging Face side: tensor names, and their parts of config.json.

Everywhere ``head`` is the name of the output layer's weight in the files.
"""

from dataclasses import fields
from typing import Any

from loongplug.models.architecture import HEAD
from loongplug.models.hf_mapping import Row, Source, Split
from loongplug.models.hf_model import HuggingFacePart
from loongplug.models.hf_rows import (
    decoder_layer,
    decoder_rows,
    dense_mlp_rows,
    expert_row,
    head_size,
    row,
    text_values,
    twins,
)
from loongplug.models.rope_settings import Llama3Scaling
from loongplug.models.text_decoders.config import (
    LlamaTextConfig,
    MistralTextConfig,
    PlainTextConfig,
    Qwen2TextConfig,
    Qwen3MoeTextConfig,
    Qwen3TextConfig,
)

_LLAMA3, _DYNAMIC = "llama3", "dynamic"


def llama(text: LlamaTextConfig, *, ours: str, theirs: str, head: str = HEAD) -> HuggingFacePart:
    """Llama's decoder."""
    heads = text.num_attention_heads
    return HuggingFacePart(
        rows=_dense_rows(text, ours=ours, theirs=theirs, head=head),
        values=_values(text) | {"attention_bias": False, "mlp_bias": False},
        twins=twins(text, theirs=theirs, head=head),
        inexpressible=()
        if text.hidden_size % heads == 0
        else (
            f"foundation.hidden_size is {text.hidden_size}, but transformers' LlamaConfig asks for "
            f"a multiple of num_attention_heads {heads}; only a model with that can be exchanged "
            "with it",
        ),
    )


def mistral(
    text: MistralTextConfig, *, ours: str, theirs: str, head: str = HEAD
) -> HuggingFacePart:
    """Mistral's decoder."""
    return HuggingFacePart(
        rows=_dense_rows(text, ours=ours, theirs=theirs, head=head),
        values=_values(text),
        twins=twins(text, theirs=theirs, head=head),
    )


def qwen2(text: Qwen2TextConfig, *, ours: str, theirs: str, head: str = HEAD) -> HuggingFacePart:
    """Qwen2's decoder."""
    return HuggingFacePart(
        rows=_dense_rows(text, ours=ours, theirs=theirs, head=head, qkv_bias=True),
        values=_values(text) | _own_head(text) | {"use_sliding_window": False},
        twins=twins(text, theirs=theirs, head=head),
    )


def qwen3(text: Qwen3TextConfig, *, ours: str, theirs: str, head: str = HEAD) -> HuggingFacePart:
    """Qwen3's decoder."""
    return HuggingFacePart(
        rows=_dense_rows(text, ours=ours, theirs=theirs, head=head, qk_norm=True),
        values=_values(text) | {"attention_bias": False, "use_sliding_window": False},
        twins=twins(text, theirs=theirs, head=head),
    )


def qwen3_moe(
    text: Qwen3MoeTextConfig, *, ours: str, theirs: str, head: str = HEAD
) -> HuggingFacePart:
    """Qwen3's decoder with experts."""
    return HuggingFacePart(
        rows=[
            *decoder_rows(text, ours=ours, theirs=theirs, qkv_bias=False, qk_norm=True, head=head),
            *_expert_rows(text, ours=ours, theirs=theirs),
        ],
        values=_values(text)
        | _own_head(text)
        | {
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        twins=twins(text, theirs=theirs, head=head),
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
    """The same, and a head's channels, of which not every config.json says something."""
    channels = getattr(text, "head_dim", None)
    head = head_size(text) if channels is None else {"kv_channels": channels}
    return head | scaling(text)


def _values(text: PlainTextConfig) -> dict[str, Any]:
    """What config.json says of all of them, besides the numbers that have a key."""
    scaling, factor = text.rope_scaling, text.dynamic_rope_factor
    if factor is not None:
        return text_values(rope_type=_DYNAMIC, factor=factor)
    return text_values(**({} if scaling is None else {"rope_type": _LLAMA3, **vars(scaling)}))


def _own_head(text: PlainTextConfig) -> dict[str, Any]:
    """A head's channels, where they are not what transformers takes when nothing is said."""
    filled = text.kv_channels * text.num_attention_heads == text.hidden_size
    return {} if filled else {"head_dim": text.kv_channels}


def _dense_rows(
    text: PlainTextConfig,
    *,
    ours: str,
    theirs: str,
    head: str,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> list[Row]:
    return [
        *decoder_rows(
            text, ours=ours, theirs=theirs, qkv_bias=qkv_bias, qk_norm=qk_norm, head=head
        ),
        *dense_mlp_rows(text, ours=ours, theirs=theirs),
    ]


def _expert_rows(text: Qwen3MoeTextConfig, *, ours: str, theirs: str) -> list[Row]:
    """Router and experts, whose tensors transformers stacks when it reads the files."""
    experts, hidden, ffn = text.num_experts, text.hidden_size, text.expert_ffn_hidden_size
    layer, mlp, count = decoder_layer(ours), f"{theirs}.layers.{{}}.mlp.", text.num_layers
    one = f"{mlp}experts.{{expert}}."
    gate, up = (Source(f"{one}{part}_proj.weight", (ffn, hidden)) for part in ("gate", "up"))
    down = Source(f"{one}down_proj.weight", (hidden, ffn))
    stacked = (
        Source(f"{mlp}experts.gate_up_proj", (experts, 2 * ffn, hidden), parts=2, experts=True),
        Source(f"{mlp}experts.down_proj", (experts, hidden, ffn), experts=True),
    )
    return [
        row(f"{layer}mlp.router.weight", f"{mlp}gate.weight", shape=(experts, hidden), count=count),
        *(
            expert_row(
                layer,
                linear,
                sources,
                split=split,
                count=count,
                experts=experts,
                in_model=(in_model,),
            )
            for linear, sources, split, in_model in (
                ("linear_fc1", (gate, up), Split.COLUMN, stacked[0]),
                ("linear_fc2", (down,), Split.ROW, stacked[1]),
            )
        ),
    ]
