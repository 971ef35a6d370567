"""Qwen3-VL on the Hugging Face side: the table of tensor names, and the model's config.json."""

from typing import Any

from loongplug.models.hf_mapping import Mapping, Row, Source, Split
from loongplug.models.hf_model import HuggingFaceModel
from loongplug.models.hf_rows import (
    TEXT,
    TEXT_HF,
    VISION,
    VISION_HF,
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
from loongplug.models.qwen3_vl.config import Qwen3VisionConfig, Qwen3VLConfig


def hugging_face(config: Qwen3VLConfig) -> HuggingFaceModel:
    """The model's tensors and config.json in ``transformers``."""
    text = config.foundation
    rows = [
        *encoder_rows(config.image_encoder),
        *projector_rows(config.image_encoder, out=text.hidden_size),
        *decoder_rows(text, qkv_bias=False, qk_norm=True),
        *swiglu_rows(
            TEXT,
            f"{TEXT_HF}mlp",
            hidden=text.hidden_size,
            ffn=text.ffn_hidden_size,
            count=text.num_layers,
            bias=False,
        ),
    ]
    return HuggingFaceModel(
        mapping=Mapping(rows, twins=twins(text)),
        config_class="Qwen3VLConfig",
        architecture="Qwen3VLForConditionalGeneration",
        sections={
            "text_config": text_section(
                text, mrope={"mrope_interleaved": True}, more={"head_dim": text.kv_channels}
            ),
            "vision_config": vision_section(config.image_encoder, out=text.hidden_size),
        },
        top=top_level(config),
        inexpressible=inexpressible(config),
    )


def encoder_rows(vision: Qwen3VisionConfig) -> list[Row]:
    """The image encoder."""
    hidden, ffn, count = vision.hidden_size, vision.ffn_hidden_size, vision.num_layers
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    convolution = "model.visual.patch_embed.proj"
    rows = [
        row("image_encoder.patch_embed.weight", f"{convolution}.weight", shape=(hidden, *patch)),
        row("image_encoder.patch_embed.bias", f"{convolution}.bias", shape=(hidden,)),
        row(
            "image_encoder.position_embedding.weight",
            "model.visual.pos_embed.weight",
            shape=(vision.num_position_embeddings, hidden),
        ),
    ]
    for kind, width in (("weight", (hidden,)), ("bias", ())):
        fused = Source(f"{VISION_HF}attn.qkv.{kind}", (3 * hidden, *width), parts=3)
        rows += [
            attention_norm(
                VISION, f"{VISION_HF}norm1.{kind}", kind=kind, width=hidden, count=count
            ),
            mlp_norm(VISION, f"{VISION_HF}norm2.{kind}", kind=kind, width=hidden, count=count),
            qkv(VISION, (fused,), kind=kind, groups=vision.num_attention_heads, count=count),
        ]
    for ours, theirs, split, shape in (
        ("self_attention.linear_proj", "attn.proj", Split.ROW, (hidden, hidden)),
        ("mlp.linear_fc1", "mlp.linear_fc1", Split.COLUMN, (ffn, hidden)),
        ("mlp.linear_fc2", "mlp.linear_fc2", Split.ROW, (hidden, ffn)),
    ):
        rows += linear(
            f"{VISION}{ours}", f"{VISION_HF}{theirs}", shape=shape, split=split, count=count
        )
    return rows


def projector_rows(vision: Qwen3VisionConfig, *, out: int) -> list[Row]:
    """The merger and the deepstack mergers, into the decoder's width ``out``."""
    single = vision.hidden_size
    merged = single * vision.spatial_merge_size**2
    taps = len(vision.deepstack_layers)
    rows: list[Row] = []
    # A deepstack merger norms merged patches, the last layer's merger single ones.
    for ours, theirs, norm, count in (
        ("image_projector.merger", "model.visual.merger", single, None),
        ("image_projector.deepstack.{}", "model.visual.deepstack_merger_list.{}", merged, taps),
    ):
        for kind in ("weight", "bias"):
            names = f"{ours}.norm.{kind}", f"{theirs}.norm.{kind}"
            rows.append(row(*names, shape=(norm,), count=count))
        for layer, split, shape in (
            ("linear_fc1", Split.COLUMN, (merged, merged)),
            ("linear_fc2", Split.ROW, (out, merged)),
        ):
            rows += linear(
                f"{ours}.{layer}", f"{theirs}.{layer}", shape=shape, split=split, count=count
            )
    return rows


def vision_section(vision: Qwen3VisionConfig, *, out: int) -> dict[str, Any]:
    """config.json's ``vision_config``."""
    return {
        "depth": vision.num_layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_hidden_size,
        "num_heads": vision.num_attention_heads,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": vision.in_channels,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "num_position_embeddings": vision.num_position_embeddings,
        "deepstack_visual_indexes": list(vision.deepstack_layers),
        "out_hidden_size": out,
        "initializer_range": vision.initializer_range,
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rotary_base},
    }
