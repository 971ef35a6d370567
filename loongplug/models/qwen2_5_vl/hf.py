"""Qwen2.5-VL on the Hugging Face side: the table of tensor names, and the model's config.json.

The names are those of the published files, which ``transformers`` writes as well; its modules are
called otherwise (``model.visual``, ``model.language_model``).
"""

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
from loongplug.models.qwen2_5_vl.config import (
    Qwen25DecoderConfig,
    Qwen25VisionConfig,
    Qwen25VLConfig,
)

_DECODER_HF, _VISION_HF = "model", "visual.blocks.{}."


def hugging_face(config: Qwen25VLConfig) -> HuggingFaceModel:
    """The model's tensors and config.json in ``transformers``."""
    text = config.foundation
    rows = [
        *encoder_rows(config.image_encoder),
        *projector_rows(config.image_encoder, out=text.hidden_size),
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
        config_class="Qwen2_5_VLConfig",
        architecture="Qwen2_5_VLForConditionalGeneration",
        sections={
            "text_config": text_section(text, mrope={}, more={"use_sliding_window": False}),
            "vision_config": vision_section(config.image_encoder, out=text.hidden_size),
        },
        top=top_level(config),
        inexpressible=(*inexpressible(config), *_other_head_size(text)),
        prefixes=(("visual.", "model.visual."), ("model.", "model.language_model.")),
    )


def encoder_rows(vision: Qwen25VisionConfig) -> list[Row]:
    """The image encoder."""
    hidden, count = vision.hidden_size, vision.num_layers
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    rows = [
        row(
            "image_encoder.patch_embed.weight",
            "visual.patch_embed.proj.weight",
            shape=(hidden, *patch),
        ),
        attention_norm(
            VISION, f"{_VISION_HF}norm1.weight", kind="weight", width=hidden, count=count
        ),
        mlp_norm(VISION, f"{_VISION_HF}norm2.weight", kind="weight", width=hidden, count=count),
        *linear(
            f"{VISION}self_attention.linear_proj",
            f"{_VISION_HF}attn.proj",
            shape=(hidden, hidden),
            split=Split.ROW,
            count=count,
        ),
        *swiglu_rows(
            VISION,
            f"{_VISION_HF}mlp",
            hidden=hidden,
            ffn=vision.ffn_hidden_size,
            count=count,
            bias=True,
        ),
    ]
    for kind, width in (("weight", (hidden,)), ("bias", ())):
        fused = Source(f"{_VISION_HF}attn.qkv.{kind}", (3 * hidden, *width), parts=3)
        rows.append(
            qkv(VISION, (fused,), kind=kind, groups=vision.num_attention_heads, count=count)
        )
    return rows


def projector_rows(vision: Qwen25VisionConfig, *, out: int) -> list[Row]:
    """The merger, into the decoder's width ``out``."""
    merged = vision.hidden_size * vision.spatial_merge_size**2
    ours, theirs = "image_projector.merger", "visual.merger"
    rows = [row(f"{ours}.norm.weight", f"{theirs}.ln_q.weight", shape=(vision.hidden_size,))]
    for layer, number, split, shape in (
        ("linear_fc1", 0, Split.COLUMN, (merged, merged)),
        ("linear_fc2", 2, Split.ROW, (out, merged)),
    ):
        names = f"{ours}.{layer}", f"{theirs}.mlp.{number}"
        rows += linear(*names, shape=shape, split=split, count=None)
    return rows


def vision_section(vision: Qwen25VisionConfig, *, out: int) -> dict[str, Any]:
    """config.json's ``vision_config``."""
    return {
        "depth": vision.num_layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_hidden_size,
        "num_heads": vision.num_attention_heads,
        "hidden_act": "silu",
        "in_channels": vision.in_channels,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "window_size": vision.window_size,
        "fullatt_block_indexes": list(vision.full_attention_layers),
        "tokens_per_second": vision.tokens_per_second,
        "out_hidden_size": out,
        "initializer_range": vision.initializer_range,
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rotary_base},
    }


def _other_head_size(text: Qwen25DecoderConfig) -> tuple[str, ...]:
    """transformers has no key for the size of a head: it is hidden_size over the heads."""
    if text.kv_channels * text.num_attention_heads == text.hidden_size:
        return ()
    return (
        f"foundation.kv_channels is {text.kv_channels}, but transformers' model has hidden_size / "
        f"num_attention_heads = {text.hidden_size / text.num_attention_heads:g} there; only a "
        "model with that value can be exchanged with it",
    )
