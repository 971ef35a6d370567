"""Qwen2-VL's modules on the Hugging Face side: tensor names, and their parts of config.json."""

from typing import Any

from loongplug.models.architecture import HEAD, ProjectorArchitecture, VisionArchitecture
from loongplug.models.hf_mapping import Row, Source, Split
from loongplug.models.hf_model import HuggingFacePart
from loongplug.models.hf_rows import (
    decoder_rows,
    dense_mlp_rows,
    encoder_layer,
    fixed_epsilon,
    linear,
    merger_rows,
    norms,
    patch_embedding,
    qkv,
    text_values,
    twins,
    vision_values,
)
from qwen2_vl.config import Qwen2DecoderConfig, Qwen2VisionConfig


def encoder(vision: Qwen2VisionConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The image encoder."""
    return HuggingFacePart(
        rows=_encoder_rows(vision, ours=ours, theirs=theirs),
        values=vision_values("quick_gelu")
        | {"mlp_ratio": vision.ffn_hidden_size // vision.hidden_size},
        inexpressible=(*fixed_epsilon(vision, ours=ours), *_other_ratio(vision)),
    )


def projector(
    projector: ProjectorArchitecture,
    *,
    vision: VisionArchitecture,
    out: int,
    ours: str,
    theirs: str,
) -> HuggingFacePart:
    """The merger, into the decoder's width ``out``."""
    return HuggingFacePart(
        rows=merger_rows(
            f"{ours}.merger",
            f"{theirs}.merger",
            vision=vision,
            out=out,
            norm="ln_q",
            linears=("mlp.0", "mlp.2"),
        ),
        values={"hidden_size": out},
        inexpressible=fixed_epsilon(projector, ours=ours),
    )


def decoder(
    text: Qwen2DecoderConfig, *, ours: str, theirs: str, head: str = HEAD
) -> HuggingFacePart:
    """The text decoder."""
    return HuggingFacePart(
        rows=[
            *decoder_rows(text, ours=ours, theirs=theirs, qkv_bias=True, qk_norm=False, head=head),
            *dense_mlp_rows(text, ours=ours, theirs=theirs),
        ],
        values=text_values() | {"use_sliding_window": False},
        twins=twins(text, theirs=theirs, head=head),
        inexpressible=_other_head_size(text),
    )


def _encoder_rows(vision: Qwen2VisionConfig, *, ours: str, theirs: str) -> list[Row]:
    layer, their_layer = encoder_layer(ours), f"{theirs}.blocks.{{}}."
    hidden, ffn, count = vision.hidden_size, vision.ffn_hidden_size, vision.num_layers
    rows = [patch_embedding(vision, ours=ours, theirs=theirs)]
    for kind, width in (("weight", (hidden,)), ("bias", ())):
        fused = Source(f"{their_layer}attn.qkv.{kind}", (3 * hidden, *width), parts=3)
        rows += [
            *norms(
                layer,
                (f"{their_layer}norm1", f"{their_layer}norm2"),
                kind=kind,
                width=hidden,
                count=count,
            ),
            qkv(layer, (fused,), kind=kind, groups=vision.num_attention_heads, count=count),
        ]
    for own, other, split, shape in (
        ("self_attention.linear_proj", "attn.proj", Split.ROW, (hidden, hidden)),
        ("mlp.linear_fc1", "mlp.fc1", Split.COLUMN, (ffn, hidden)),
        ("mlp.linear_fc2", "mlp.fc2", Split.ROW, (hidden, ffn)),
    ):
        names = f"{layer}{own}", f"{their_layer}{other}"
        rows += linear(*names, shape=shape, split=split, count=count)
    return rows


def mlp_width(vision: Any) -> dict[str, Any]:
    """config.json has it as a multiple of the hidden size."""
    return {"ffn_hidden_size": vision.embed_dim * vision.mlp_ratio}


def _other_ratio(vision: Qwen2VisionConfig) -> tuple[str, ...]:
    """transformers derives the MLP's width from the hidden size."""
    if vision.ffn_hidden_size % vision.hidden_size == 0:
        return ()
    return (
        f"image_encoder.ffn_hidden_size is {vision.ffn_hidden_size}, but transformers' model "
        f"has a multiple of its hidden_size {vision.hidden_size} there",
    )


def _other_head_size(text: Qwen2DecoderConfig) -> tuple[str, ...]:
    """transformers derives the size of a head from the hidden size."""
    if text.kv_channels * text.num_attention_heads == text.hidden_size:
        return ()
    return (
        f"foundation.kv_channels is {text.kv_channels}, but transformers' model has "
        "hidden_size / num_attention_heads there",
    )
