"""Qwen3-VL-MoE's decoder on the Hugging Face side: router, experts, its part of config.json."""

from loongplug.models.architecture import HEAD
from loongplug.models.hf_mapping import Row, Source, Split
from loongplug.models.hf_model import HuggingFacePart
from loongplug.models.hf_rows import (
    decoder_layer,
    expert_row,
    row,
    swiglu_rows,
    text_values,
    twins,
)
from loongplug.models.qwen3_vl.hf import attention_rows
from loongplug.models.qwen3_vl_moe.config import Qwen3MoeDecoderConfig


def decoder(
    text: Qwen3MoeDecoderConfig, *, ours: str, theirs: str, head: str = HEAD
) -> HuggingFacePart:
    """The text decoder."""
    return HuggingFacePart(
        rows=[
            *attention_rows(text, ours=ours, theirs=theirs, head=head),
            *expert_rows(text, ours=ours, theirs=theirs),
            *_shared_expert_rows(text, ours=ours, theirs=theirs),
        ],
        values=text_values(mrope_interleaved=True)
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        twins=twins(text, theirs=theirs, head=head),
        inexpressible=_ambiguous(text),
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


def expert_rows(text: Qwen3MoeDecoderConfig, *, ours: str, theirs: str) -> list[Row]:
    """Router and experts; the latter's tensors hold all experts, each as (inputs, outputs)."""
    experts, hidden, ffn = text.num_experts, text.hidden_size, text.expert_ffn_hidden_size
    layer, mlp = decoder_layer(ours), f"{theirs}.layers.{{}}.mlp."
    gate_up = Source(
        f"{mlp}experts.gate_up_proj",
        (experts, hidden, 2 * ffn),
        parts=2,
        experts=True,
        transposed=True,
    )
    down = Source(f"{mlp}experts.down_proj", (experts, ffn, hidden), experts=True, transposed=True)
    return [
        row(
            f"{layer}mlp.router.weight",
            f"{mlp}gate.weight",
            shape=(experts, hidden),
            count=text.num_layers,
        ),
        *(
            expert_row(
                layer, linear, (source,), split=split, count=text.num_layers, experts=experts
            )
            for linear, source, split in (
                ("linear_fc1", gate_up, Split.COLUMN),
                ("linear_fc2", down, Split.ROW),
            )
        ),
    ]


def _shared_expert_rows(text: Qwen3MoeDecoderConfig, *, ours: str, theirs: str) -> list[Row]:
    """By the names that transformers' other Qwen models have: no folder of this family has them."""
    if text.shared_expert_ffn_hidden_size is None:
        return []
    return swiglu_rows(
        decoder_layer(ours),
        f"{theirs}.layers.{{}}.mlp.shared_expert",
        hidden=text.hidden_size,
        ffn=text.shared_expert_ffn_hidden_size,
        count=text.num_layers,
        bias=False,
        mlp="mlp.shared_experts",
    )
