"""Patch transformers on the Hugging Face side: names of tensors, and keys of config.json."""

from typing import Any

from loongplug.models.family import HuggingFacePart
from loongplug.models.hf_mapping import Row, Shape
from loongplug.models.hf_rows import Table, carried_rows, encoder_layers, layer_rows
from loongplug.models.patch_transformer import (
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
    whole, in_front = Table(f"{ours}.", f"{theirs}."), (1,) * names.batched
    patch = (vision.in_channels, vision.patch_size, vision.patch_size)
    positions = (*in_front, vision.side**2 + vision.has_class_token(), hidden)
    rows = [
        whole.row("patch_embed.weight", f"{names.patches}.weight", (hidden, *patch)),
        whole.row("position_embedding.weight", names.positions, positions, leading=len(in_front)),
    ]
    if names.patches_bias:
        rows.append(whole.row("patch_embed.bias", f"{names.patches}.bias", (hidden,)))
    if names.class_token is not None:
        shape = (*in_front, *in_front, hidden)
        rows.append(whole.row("class_token", names.class_token, shape, leading=2 * len(in_front)))
    if names.pre_norm is not None:
        rows += whole.norm("pre_norm", names.pre_norm, hidden)
    if vision.norms_features:
        rows += whole.norm("final_norm", names.final_norm, hidden)
    return rows


def _layer_rows(vision: PatchTransformerConfig, *, ours: str, theirs: str) -> list[Row]:
    """Rows of the layers that run."""
    names = vision.names
    layer = encoder_layers(vision, ours=ours, theirs=f"{theirs}.{names.layer}")
    scales = zip(("self_attn_bda", "mlp_bda"), names.layer_scales or (), strict=False)
    return layer_rows(vision, names, ours=ours, theirs=theirs) + [
        layer.row(f"{name}.weight", other, (vision.hidden_size,)) for name, other in scales
    ]


def carried_tensors(vision: PatchTransformerConfig) -> dict[str, Shape]:
    """Their names behind the tower's root in the files, and their shapes there.

    The layers behind the feature layer, the final norm where no feature goes through it, and what
    a kind has for other ends.
    """
    hidden, ffn, names = vision.hidden_size, vision.ffn_hidden_size, vision.names
    linears = {
        **dict.fromkeys((*names.qkv, names.proj), (hidden, hidden)),
        names.mlp[0]: (ffn, hidden),
        names.mlp[1]: (hidden, ffn),
    }
    layer: dict[str, Shape] = {}
    for name in names.norms:
        layer |= _norm(name, hidden=hidden)
    for name, shape in linears.items():
        layer |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    layer |= dict.fromkeys(names.layer_scales or (), (hidden,))
    carried: dict[str, Shape] = {
        names.layer.format(number) + name: shape
        for number in range(vision.computed_layers, vision.num_layers)
        for name, shape in layer.items()
    }
    if vision.has_final_norm() and not vision.norms_features:
        carried |= _norm(names.final_norm, hidden=hidden)
    return {**carried, **vision.other_tensors()}


def _norm(name: str, *, hidden: int) -> dict[str, Shape]:
    return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
