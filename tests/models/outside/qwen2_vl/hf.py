"""Qwen2-VL on the Hugging Face side: the table of tensor names, and the model's config.json."""

from typing import Any

from loongplug.models.hf_mapping import Mapping, Row, Source, Split
from loongplug.models.hf_model import HuggingFaceModel
from loongplug.models.hf_rows import (
    TEXT,
    VISION,
    attention_norm,
    decoder_rows,
    inexpressible,
    linear,
    mlp_norm,
    qkv,
    row,
    swiglu_rows,
    text_section,
    top_level,
    twins,
)
from qwen2_vl.config import Qwen2DecoderConfig, Qwen2VisionConfig, Qwen2VLConfig

_DECODER_HF, _VISION_HF = "model", "visual.blocks.{}."


def hugging_face(config: Qwen2VLConfig) -> HuggingFaceModel:
    """The model's tensors and config.json in ``transformers``."""
    vision, text = config.image_encoder, config.foundation
    rows = [
        *_encoder_rows(vision),
        *_projector_rows(vision, out=text.hidden_size),
        *decoder_rows(text, qkv_bias=True, qk_norm=False, theirs=_DECODER_HF),
        *swiglu_rows(
            TEXT,
            f"{_DECODER_HF}.layers.{{}}.mlp",
            hidden=text.hidden_size,
            ffn=text.ffn_hidden_size,
            count=text.num_layers,
            bias=False,
        ),
    ]
    return HuggingFaceModel(
        mapping=Mapping(rows, twins=twins(text, theirs=_DECODER_HF)),
        config_class="Qwen2VLConfig",
        architecture="Qwen2VLForConditionalGeneration",
        sections={
            "text_config": text_section(text, mrope={}, more={"use_sliding_window": False}),
            "vision_config": _vision_section(vision, out=text.hidden_size),
        },
        top=top_level(config),
        inexpressible=(*inexpressible(config), *_other_ratios(vision, text)),
    )


def _encoder_rows(vision: Qwen2VisionConfig) -> list[Row]:
    hidden, ffn, count = vision.hidden_size, vision.ffn_hidden_size, vision.num_layers
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    embedding = "image_encoder.patch_embed.weight", "visual.patch_embed.proj.weight"
    rows = [row(*embedding, shape=(hidden, *patch))]
    for kind, width in (("weight", (hidden,)), ("bias", ())):
        fused = Source(f"{_VISION_HF}attn.qkv.{kind}", (3 * hidden, *width), parts=3)
        rows += [
            attention_norm(
                VISION, f"{_VISION_HF}norm1.{kind}", kind=kind, width=hidden, count=count
            ),
            mlp_norm(VISION, f"{_VISION_HF}norm2.{kind}", kind=kind, width=hidden, count=count),
            qkv(VISION, (fused,), kind=kind, groups=vision.num_attention_heads, count=count),
        ]
    for ours, theirs, split, shape in (
        ("self_attention.linear_proj", "attn.proj", Split.ROW, (hidden, hidden)),
        ("mlp.linear_fc1", "mlp.fc1", Split.COLUMN, (ffn, hidden)),
        ("mlp.linear_fc2", "mlp.fc2", Split.ROW, (hidden, ffn)),
    ):
        names = f"{VISION}{ours}", f"{_VISION_HF}{theirs}"
        rows += linear(*names, shape=shape, split=split, count=count)
    return rows


def _projector_rows(vision: Qwen2VisionConfig, *, out: int) -> list[Row]:
    merged = vision.hidden_size * vision.spatial_merge_size**2
    ours, theirs = "image_projector.merger", "visual.merger"
    rows = [
        row(f"{ours}.norm.{kind}", f"{theirs}.ln_q.{kind}", shape=(vision.hidden_size,))
        for kind in ("weight", "bias")
    ]
    for layer, number, split, shape in (
        ("linear_fc1", 0, Split.COLUMN, (merged, merged)),
        ("linear_fc2", 2, Split.ROW, (out, merged)),
    ):
        names = f"{ours}.{layer}", f"{theirs}.mlp.{number}"
        rows += linear(*names, shape=shape, split=split, count=None)
    return rows


def _vision_section(vision: Qwen2VisionConfig, *, out: int) -> dict[str, Any]:
    return {
        "depth": vision.num_layers,
        "embed_dim": vision.hidden_size,
        "hidden_size": out,
        "mlp_ratio": vision.ffn_hidden_size // vision.hidden_size,
        "num_heads": vision.num_attention_heads,
        "hidden_act": "quick_gelu",
        "in_channels": vision.in_channels,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "initializer_range": vision.initializer_range,
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rotary_base},
    }


def _other_ratios(vision: Qwen2VisionConfig, text: Qwen2DecoderConfig) -> tuple[str, ...]:
    """What transformers derives from other sizes."""
    problems = []
    if vision.ffn_hidden_size % vision.hidden_size:
        problems.append(
            f"image_encoder.ffn_hidden_size is {vision.ffn_hidden_size}, but transformers' model "
            f"has a multiple of its hidden_size {vision.hidden_size} there"
        )
    if text.kv_channels * text.num_attention_heads != text.hidden_size:
        problems.append(
            f"foundation.kv_channels is {text.kv_channels}, but transformers' model has "
            f"hidden_size / num_attention_heads there"
        )
    return tuple(problems)
