"""The patch transformer on the Hugging Face side: tensor names, and their parts of config.json."""

from typing import Any

from loongplug.models.hf_encoder_rows import carried_rows, layer_rows
from loongplug.models.hf_mapping import Row, Source
from loongplug.models.hf_model import HuggingFacePart
from loongplug.models.hf_rows import encoder_layer, norm_rows, row
from loongplug.models.patch_transformer.carried import carried_tensors
from loongplug.models.patch_transformer.config import (
    Dinov2VisionConfig,
    InternVisionConfig,
    PatchTransformerConfig,
)


def encoder(vision: PatchTransformerConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The image encoder, of any kind.

    Published files of CLIP and SigLIP have ``vision_model`` between the tower's root and the
    names; a family whose files have it names such a root.
    """
    return HuggingFacePart(
        rows=[
            *_embedding_rows(vision, ours=ours, theirs=theirs),
            *_layer_rows(vision, ours=ours, theirs=theirs),
            *carried_rows(carried_tensors(vision), ours=ours, theirs=theirs),
        ],
        values=_values(vision),
        inexpressible=_inexpressible(vision, ours=ours),
    )


def mlp_width(section: Any) -> dict[str, Any]:
    """DINOv2's config.json has the MLP's width as a multiple of the hidden size."""
    return {"ffn_hidden_size": int(section.hidden_size * section.mlp_ratio)}


def of_internvl(section: Any) -> dict[str, Any]:
    """InternVL's config.json has both sides of images and patches, and the pooling for the norm."""
    sizes = {}
    for name in ("image_size", "patch_size"):
        height, width = getattr(section, name)
        if height != width:
            raise TypeError(f"{name} {height} x {width} is not a square")
        sizes[name] = height
    return sizes | {"final_norm": not section.use_mean_pooling}


def _values(vision: PatchTransformerConfig) -> dict[str, Any]:
    if isinstance(vision, Dinov2VisionConfig):
        return {
            "mlp_ratio": vision.ffn_hidden_size // vision.hidden_size,
            "use_swiglu_ffn": False,
            "qkv_bias": True,
        }
    if isinstance(vision, InternVisionConfig):
        return {
            "image_size": [vision.image_size] * 2,
            "patch_size": [vision.patch_size] * 2,
            "use_mean_pooling": not vision.final_norm,
            "norm_type": "layer_norm",
            "use_qk_norm": False,
            "attention_bias": True,
            "use_absolute_position_embeddings": True,
        }
    return {}


def _inexpressible(vision: PatchTransformerConfig, *, ours: str) -> tuple[str, ...]:
    ffn, hidden = vision.ffn_hidden_size, vision.hidden_size
    if isinstance(vision, Dinov2VisionConfig) and ffn % hidden:
        return (
            f"{ours}.ffn_hidden_size is {ffn}, but transformers' model has a multiple of "
            f"hidden_size {hidden} there; only a model with such a value can be exchanged with it",
        )
    return ()


def _embedding_rows(vision: PatchTransformerConfig, *, ours: str, theirs: str) -> list[Row]:
    names, hidden = vision.names, vision.hidden_size
    in_front = (1,) if names.batched else ()
    patch = (vision.in_channels, vision.patch_size, vision.patch_size)
    tokens = vision.side**2 + (0 if names.class_token is None else 1)
    rows = [
        row(
            f"{ours}.patch_embed.weight", f"{theirs}.{names.patches}.weight", shape=(hidden, *patch)
        ),
        Row(
            (f"{ours}.position_embedding.weight",),
            (
                Source(
                    f"{theirs}.{names.positions}",
                    (*in_front, tokens, hidden),
                    leading=len(in_front),
                ),
            ),
        ),
    ]
    if names.patches_bias:
        bias = f"{theirs}.{names.patches}.bias"
        rows.append(row(f"{ours}.patch_embed.bias", bias, shape=(hidden,)))
    if names.class_token is not None:
        shape = (*in_front, *in_front, hidden)
        token = Source(f"{theirs}.{names.class_token}", shape, leading=len(shape) - 1)
        rows.append(Row((f"{ours}.class_token",), (token,)))
    of_norms = {"pre_norm": names.pre_norm}
    if vision.norms_features:
        of_norms["final_norm"] = names.final_norm
    for own, other in of_norms.items():
        if other is not None:
            rows += norm_rows(f"{ours}.{own}", f"{theirs}.{other}", width=hidden)
    return rows


def _layer_rows(vision: PatchTransformerConfig, *, ours: str, theirs: str) -> list[Row]:
    """Those of the layers that run."""
    names, own = vision.names, encoder_layer(ours)
    scales = zip(("self_attn_bda", "mlp_bda"), names.layer_scales or (), strict=False)
    return layer_rows(vision, names, ours=ours, theirs=theirs) + [
        row(
            f"{own}{name}.weight",
            f"{theirs}.{names.layer}{other}",
            shape=(vision.hidden_size,),
            count=vision.computed_layers,
        )
        for name, other in scales
    ]
