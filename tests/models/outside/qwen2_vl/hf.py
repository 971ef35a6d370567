"""Qwen2-VL's modules on the Hugging Face side: tensor names, and their parts of config.json."""

from typing import Any

from loongplug.models.architecture import ProjectorArchitecture, VisionArchitecture
from loongplug.models.family import HuggingFacePart, fixed_epsilon
from loongplug.models.hf_rows import (
    LayerNames,
    Table,
    layer_rows,
    merger_rows,
    patch_embedding,
    text_decoder,
    vision_values,
)
from qwen2_vl.config import Qwen2DecoderConfig, Qwen2VisionConfig

_LAYER = LayerNames(
    layer="blocks.{}.",
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    proj="attn.proj",
    mlp=("mlp.fc1", "mlp.fc2"),
)


def encoder(vision: Qwen2VisionConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The image encoder."""
    return HuggingFacePart(
        rows=[
            patch_embedding(vision, ours=ours, theirs=theirs),
            *layer_rows(vision, _LAYER, ours=ours, theirs=theirs),
        ],
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
            Table(f"{ours}.merger.", f"{theirs}.merger."),
            vision=vision,
            out=out,
            norm="ln_q",
            linears=("mlp.0", "mlp.2"),
        ),
        values={"hidden_size": out},
        inexpressible=fixed_epsilon(projector, ours=ours),
    )


def decoder(text: Qwen2DecoderConfig, **names: Any) -> HuggingFacePart:
    """The text decoder."""
    return text_decoder(
        text,
        qkv_bias=True,
        values={"use_sliding_window": False},
        inexpressible=_other_head_size(text),
        **names,
    )


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
