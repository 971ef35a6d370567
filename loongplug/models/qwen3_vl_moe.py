"""The Qwen3-VL-MoE family: Qwen3-VL with experts in place of the decoder's MLPs. Here is that
decoder; encoder and projector are those of the dense family.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from loongplug.models.family import QWEN_VISION_TOKENS, Family, HuggingFacePart, InTransformers
from loongplug.models.hf_mapping import Row, Split
from loongplug.models.hf_rows import Table, text_decoder
from loongplug.models.parts import MULTIMODAL_TEXT_JSON, SOFTMAX_ROUTING, DecoderPart
from loongplug.models.qwen3_vl import ROOTS, Qwen3DecoderConfig, Qwen3VLConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeDecoderConfig(Qwen3DecoderConfig):
    """The text decoder with experts in every layer.

    ``ffn_hidden_size`` is the width of a dense MLP, which no layer has: it only stands in
    config.json. ``shared_expert_ffn_hidden_size`` is that of all shared experts together, which see
    every token; None for none, as in the published models.
    """

    num_experts: int
    experts_per_token: int
    expert_ffn_hidden_size: int
    shared_expert_ffn_hidden_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeConfig(Qwen3VLConfig):
    """A whole Qwen3-VL-MoE."""

    foundation: Qwen3MoeDecoderConfig


def decoder(text: Qwen3MoeDecoderConfig, **names: Any) -> HuggingFacePart:
    """The text decoder."""
    return text_decoder(
        text,
        qk_norm=True,
        mlps=partial(_expert_rows, text),
        rope={"mrope_interleaved": True},
        values={"decoder_sparse_step": 1, "mlp_only_layers": []},
        inexpressible=_ambiguous(text),
        unread=_unread(text),
        **names,
    )


def _ambiguous(text: Qwen3MoeDecoderConfig) -> tuple[str, ...]:
    """transformers tells by its shape which way round a tensor of experts stands."""
    hidden, ffn = text.hidden_size, text.expert_ffn_hidden_size
    if hidden not in (ffn, 2 * ffn):
        return ()
    return (
        f"foundation.expert_ffn_hidden_size {ffn} with hidden_size {hidden} makes square matrices, "
        "of which transformers cannot tell inputs from outputs; only a model without them can be "
        "exchanged with it",
    )


def _unread(text: Qwen3MoeDecoderConfig) -> tuple[str, ...]:
    if text.shared_expert_ffn_hidden_size is None:
        return ()
    return (
        f"foundation.shared_expert_ffn_hidden_size is {text.shared_expert_ffn_hidden_size}, but "
        "transformers' model has no shared experts; only a model without them can be given to it "
        "(a checkpoint can be saved of any)",
    )


def _expert_rows(text: Qwen3MoeDecoderConfig, layer: Table) -> list[Row]:
    """Router and experts, whose tensors hold all experts, each as (inputs, outputs).

    Shared experts have the names of transformers' other Qwen models: no folder of this family has
    them.
    """
    experts, hidden, ffn = text.num_experts, text.hidden_size, text.expert_ffn_hidden_size
    fc1 = {"mlp.experts.gate_up_proj": (experts, hidden, 2 * ffn)}
    fc2 = {"mlp.experts.down_proj": (experts, ffn, hidden)}
    stacked = partial(layer.experts, count=experts, experts=True, transposed=True)
    rows = [
        layer.row("mlp.router.weight", "mlp.gate.weight", (experts, hidden)),
        stacked("linear_fc1", fc1, split=Split.COLUMN, parts=2),
        stacked("linear_fc2", fc2, split=Split.ROW),
    ]
    if (shared := text.shared_expert_ffn_hidden_size) is not None:
        names = {"theirs": "mlp.shared_expert", "ours": "mlp.shared_experts"}
        rows += layer.swiglu(**names, hidden=hidden, ffn=shared, bias=False)
    return rows


LOONGPLUG_PARTS = (
    DecoderPart(
        name="qwen3_moe",
        config_class=Qwen3MoeDecoderConfig,
        hugging_face="loongplug.models.qwen3_vl_moe:decoder",
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
            roots=ROOTS,
        ),
        special_tokens=QWEN_VISION_TOKENS,
    ),
)
