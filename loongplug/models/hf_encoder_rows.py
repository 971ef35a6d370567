"""Rows of the Hugging Face mapping that encoders with tables of names share.

``ours`` and ``theirs`` are as in :mod:`loongplug.models.hf_rows`.
"""

from collections.abc import Mapping

from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.hf_mapping import (
    CARRIED,
    Row,
    Shape,
    Source,
    Split,
    leading_axes,
    parameter_name,
)
from loongplug.models.hf_rows import encoder_layer, linear, norms, qkv
from loongplug.models.layer_names import LayerNames


def layer_rows(
    encoder: EncoderArchitecture,
    names: LayerNames,
    *,
    ours: str,
    theirs: str,
    key_bias: bool = True,
) -> list[Row]:
    """Those of the layers that run: two norms, attention and an MLP of two linears, with biases.

    Without ``key_bias`` the files have none for the keys; ours is zero.
    """
    own, layer = encoder_layer(ours), f"{theirs}.{names.layer}"
    hidden, ffn, count = encoder.hidden_size, encoder.ffn_hidden_size, encoder.computed_layers
    before_attention, before_mlp = (f"{layer}{each}" for each in names.norms)
    rows: list[Row] = []
    for kind in ("weight", "bias"):
        sources = qkv_sources(layer, names.qkv, kind=kind, hidden=hidden, key_bias=key_bias)
        rows += [
            *norms(own, (before_attention, before_mlp), kind=kind, width=hidden, count=count),
            qkv(own, sources, kind=kind, groups=encoder.num_attention_heads, count=count),
        ]
    for name, other, split, shape in (
        ("self_attention.linear_proj", names.proj, Split.ROW, (hidden, hidden)),
        ("mlp.linear_fc1", names.mlp[0], Split.COLUMN, (ffn, hidden)),
        ("mlp.linear_fc2", names.mlp[1], Split.ROW, (hidden, ffn)),
    ):
        rows += linear(f"{own}{name}", f"{layer}{other}", shape=shape, split=split, count=count)
    return rows


def qkv_sources(
    layer: str, names: tuple[str, ...], *, kind: str, hidden: int, key_bias: bool = True
) -> tuple[Source, ...]:
    """What queries, keys and values are made of: three tensors, or one; ``kind`` of each.

    ``layer`` and ``names`` are as in :class:`LayerNames`, ``key_bias`` as in :func:`layer_rows`.
    """
    parts = 3 // len(names)  # of each tensor
    rows = parts * hidden
    return tuple(
        Source(
            f"{layer}{each}.{kind}",
            (rows, hidden) if kind == "weight" else (rows,),
            parts=parts,
            absent=kind == "bias" and not key_bias and each == names[1],
        )
        for each in names
    )


def carried_rows(tensors: Mapping[str, Shape], *, ours: str, theirs: str) -> list[Row]:
    """Those of a :class:`~loongplug.models.encoder.Carried` with these tensors."""
    return [
        Row(
            (f"{ours}.{CARRIED}.{parameter_name(name)}",),
            (Source(f"{theirs}.{name}", shape, leading=leading_axes(shape)),),
        )
        for name, shape in tensors.items()
    ]
