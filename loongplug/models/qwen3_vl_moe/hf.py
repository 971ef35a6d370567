"""Qwen3-VL-MoE on the Hugging Face side: tensor names of router and experts, config.json."""

from loongplug.models.hf_mapping import Mapping, Row, Source, Split
from loongplug.models.hf_model import HuggingFaceModel
from loongplug.models.hf_rows import (
    TEXT,
    TEXT_HF,
    decoder_rows,
    inexpressible,
    row,
    swiglu_rows,
    text_section,
    top_level,
    twins,
)
from loongplug.models.qwen3_vl.hf import encoder_rows, projector_rows, vision_section
from loongplug.models.qwen3_vl_moe.config import Qwen3MoeDecoderConfig, Qwen3VLMoeConfig


def hugging_face(config: Qwen3VLMoeConfig) -> HuggingFaceModel:
    """The model's tensors and config.json in ``transformers``."""
    text = config.foundation
    rows = [
        *encoder_rows(config.image_encoder),
        *projector_rows(config.image_encoder, out=text.hidden_size),
        *decoder_rows(text, qkv_bias=False, qk_norm=True),
        *expert_rows(text),
        *_shared_expert_rows(text),
    ]
    return HuggingFaceModel(
        mapping=Mapping(rows, twins=twins(text)),
        config_class="Qwen3VLMoeConfig",
        architecture="Qwen3VLMoeForConditionalGeneration",
        sections={
            "text_config": text_section(
                text,
                mrope={"mrope_interleaved": True},
                more={
                    "head_dim": text.kv_channels,
                    "num_experts": text.num_experts,
                    "num_experts_per_tok": text.experts_per_token,
                    "moe_intermediate_size": text.expert_ffn_hidden_size,
                    "decoder_sparse_step": 1,
                    "mlp_only_layers": [],
                },
            ),
            "vision_config": vision_section(config.image_encoder, out=text.hidden_size),
        },
        top=top_level(config),
        inexpressible=(*inexpressible(config), *_ambiguous(text)),
        unread=_unread(text),
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


def expert_rows(text: Qwen3MoeDecoderConfig) -> list[Row]:
    """Router and experts; the latter's tensors hold all experts, each as (inputs, outputs)."""
    experts, hidden, ffn = text.num_experts, text.hidden_size, text.expert_ffn_hidden_size
    theirs = f"{TEXT_HF}mlp."
    gate_up = Source(
        f"{theirs}experts.gate_up_proj",
        (experts, hidden, 2 * ffn),
        parts=2,
        experts=True,
        transposed=True,
    )
    down = Source(
        f"{theirs}experts.down_proj", (experts, ffn, hidden), experts=True, transposed=True
    )
    return [
        row(
            f"{TEXT}mlp.router.weight",
            f"{theirs}gate.weight",
            shape=(experts, hidden),
            count=text.num_layers,
        ),
        _experts("linear_fc1", gate_up, Split.COLUMN, text),
        _experts("linear_fc2", down, Split.ROW, text),
    ]


def _shared_expert_rows(text: Qwen3MoeDecoderConfig) -> list[Row]:
    """By the names that transformers' other Qwen models have: no folder of this family has them."""
    if text.shared_expert_ffn_hidden_size is None:
        return []
    return swiglu_rows(
        TEXT,
        f"{TEXT_HF}mlp.shared_expert",
        hidden=text.hidden_size,
        ffn=text.shared_expert_ffn_hidden_size,
        count=text.num_layers,
        bias=False,
        mlp="mlp.shared_experts",
    )


def _experts(linear: str, source: Source, split: Split, text: Qwen3MoeDecoderConfig) -> Row:
    names = (
        f"{TEXT}mlp.experts.local_experts.{{expert}}.{linear}.weight",  # one after the other
        f"{TEXT}mlp.experts.{linear}.weight{{expert}}",  # TransformerEngine's grouped GEMM
    )
    return Row(names, (source,), split, count=text.num_layers, experts=text.num_experts)
