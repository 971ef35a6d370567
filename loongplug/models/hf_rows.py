"""Rows of the Hugging Face mapping that parts share: Megatron's layers, the text decoder.

Everywhere ``ours`` is the module's name in the built model, and ``theirs`` how the names of its
tensors begin in the files.
"""

from typing import Any

from loongplug.models.architecture import (
    HEAD,
    EncoderArchitecture,
    ProjectorArchitecture,
    TextArchitecture,
    VisionArchitecture,
)
from loongplug.models.hf_mapping import Row, Source, Split

_HF_NORM_EPSILON = 1e-6  # transformers has no key for the encoder's and the projector's norms


def row(
    ours: str,
    theirs: str,
    *,
    shape: tuple[int, ...],
    split: Split = Split.NONE,
    count: int | None = None,
) -> Row:
    """One tensor as it is."""
    return Row((ours,), (Source(theirs, shape),), split, count=count)


def linear(
    ours: str,
    theirs: str,
    *,
    shape: tuple[int, int],
    split: Split,
    count: int | None,
    bias: bool = True,
) -> list[Row]:
    """Weight and bias; a row-split layer adds its bias after the reduction, so it has it whole."""
    rows = [row(f"{ours}.weight", f"{theirs}.weight", shape=shape, split=split, count=count)]
    if bias:
        of_bias = Split.COLUMN if split is Split.COLUMN else Split.NONE
        names = f"{ours}.bias", f"{theirs}.bias"
        rows.append(row(*names, shape=shape[:1], split=of_bias, count=count))
    return rows


def patch_embedding(vision: VisionArchitecture, *, ours: str, theirs: str) -> Row:
    """Its weight: a 3D convolution there, whose stride is its kernel."""
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    names = f"{ours}.patch_embed.weight", f"{theirs}.patch_embed.proj.weight"
    return row(*names, shape=(vision.hidden_size, *patch))


def merger_rows(
    ours: str,
    theirs: str,
    *,
    vision: VisionArchitecture,
    out: int,
    norm: str,
    linears: tuple[str, str],
    norm_bias: bool = True,
    norm_blocks: bool = False,
    count: int | None = None,
) -> list[Row]:
    """A patch merger into the width ``out``; ``norm`` and ``linears`` are the files' names of both.

    With ``norm_blocks``, merged patches are normed.
    """
    merged = vision.hidden_size * vision.spatial_merge_size**2
    width = merged if norm_blocks else vision.hidden_size
    own_norm = f"{ours}.norm", f"{theirs}.{norm}"
    rows = norm_rows(*own_norm, width=width, bias=norm_bias, count=count)
    names = (f"{theirs}.{linears[0]}", f"{theirs}.{linears[1]}")
    return rows + two_linears(ours, names, sizes=(merged, merged, out), count=count)


def norm_rows(
    ours: str, theirs: str, *, width: int, bias: bool = True, count: int | None = None
) -> list[Row]:
    """A norm's weight, and its bias if it has one."""
    return [
        row(f"{ours}.{kind}", f"{theirs}.{kind}", shape=(width,), count=count)
        for kind in ("weight", *(["bias"] if bias else []))
    ]


def two_linears(
    ours: str,
    theirs: tuple[str, str],
    *,
    sizes: tuple[int, int, int],
    bias: bool = True,
    count: int | None = None,
) -> list[Row]:
    """A projector's MLP, from the first of ``sizes`` into the last: split by columns, then rows."""
    width, inner, out = sizes
    first = (f"{ours}.linear_fc1", theirs[0])
    second = (f"{ours}.linear_fc2", theirs[1])
    return [
        *linear(*first, shape=(inner, width), split=Split.COLUMN, count=count, bias=bias),
        *linear(*second, shape=(out, inner), split=Split.ROW, count=count, bias=bias),
    ]


def qkv(layer: str, sources: tuple[Source, ...], *, kind: str, groups: int, count: int) -> Row:
    """The fused projection, in Megatron's order: q, k and v of each of ``groups`` in turn."""
    name = f"{layer}self_attention.linear_qkv.{kind}"
    return Row((name,), sources, Split.COLUMN, groups=groups, count=count)


def norms(layer: str, theirs: tuple[str, str], *, kind: str, width: int, count: int) -> list[Row]:
    """Those before attention and MLP, which TransformerEngine keeps within the linear behind them
    (but for one before experts).
    """
    ours = (
        ("input_layernorm", "self_attention.linear_qkv"),
        ("pre_mlp_layernorm", "mlp.linear_fc1"),
    )
    return [
        Row(
            (f"{layer}{norm}.{kind}", f"{layer}{behind}.layer_norm_{kind}"),
            (Source(f"{name}.{kind}", (width,)),),
            count=count,
        )
        for (norm, behind), name in zip(ours, theirs, strict=True)
    ]


def decoder_layer(ours: str) -> str:
    """How the names of a decoder layer's parameters begin, ``{}`` for its number."""
    return f"{ours}.decoder.layers.{{}}."


def encoder_layer(ours: str) -> str:
    """The same of an encoder layer."""
    return f"{ours}.blocks.layers.{{}}."


def decoder_rows(
    text: TextArchitecture,
    *,
    ours: str,
    theirs: str,
    qkv_bias: bool,
    qk_norm: bool,
    head: str = HEAD,
) -> list[Row]:
    """The whole text decoder but for what stands in its MLPs.

    ``head`` is the name of the output layer's weight in the files.
    """
    hidden, count, channels = text.hidden_size, text.num_layers, text.kv_channels
    query, key = text.num_attention_heads * channels, text.num_query_groups * channels
    own, layer = decoder_layer(ours), f"{theirs}.layers.{{}}."
    attention = f"{layer}self_attn"
    rows = [
        *_embedding_rows(text, ours=ours, theirs=theirs, head=head),
        *norms(
            own,
            (f"{layer}input_layernorm", f"{layer}post_attention_layernorm"),
            kind="weight",
            width=hidden,
            count=count,
        ),
        *linear(
            f"{own}self_attention.linear_proj",
            f"{attention}.o_proj",
            shape=(hidden, query),
            split=Split.ROW,
            count=count,
            bias=False,
        ),
        row(f"{ours}.decoder.final_layernorm.weight", f"{theirs}.norm.weight", shape=(hidden,)),
    ]
    for kind, width in (("weight", (hidden,)), *([("bias", ())] if qkv_bias else [])):
        sources = tuple(
            Source(f"{attention}.{part}_proj.{kind}", (length, *width))
            for part, length in (("q", query), ("k", key), ("v", key))
        )
        rows.append(qkv(own, sources, kind=kind, groups=text.num_query_groups, count=count))
    if qk_norm:
        rows += [
            row(
                f"{own}self_attention.{part}_layernorm.weight",
                f"{attention}.{part}_norm.weight",
                shape=(channels,),
                count=count,
            )
            for part in ("q", "k")
        ]
    return rows


def dense_mlp_rows(text: TextArchitecture, *, ours: str, theirs: str) -> list[Row]:
    """The gated MLPs of a text decoder without experts."""
    return swiglu_rows(
        decoder_layer(ours),
        f"{theirs}.layers.{{}}.mlp",
        hidden=text.hidden_size,
        ffn=text.ffn_hidden_size,
        count=text.num_layers,
        bias=False,
    )


def expert_row(
    layer: str,
    linear: str,
    sources: tuple[Source, ...],
    *,
    split: Split,
    count: int,
    experts: int,
    in_model: tuple[Source, ...] = (),
) -> Row:
    """One linear of all experts; ``in_model`` as in :class:`Row`."""
    ours = f"{layer}mlp.experts"
    names = (
        f"{ours}.local_experts.{{expert}}.{linear}.weight",  # one after the other
        f"{ours}.{linear}.weight{{expert}}",  # TransformerEngine's grouped GEMM
    )
    return Row(names, sources, split, count=count, experts=experts, in_model=in_model)


def _embedding_rows(text: TextArchitecture, *, ours: str, theirs: str, head: str) -> list[Row]:
    # Tied, the last stage's output layer is a second copy of the embedding.
    vocabulary = (text.vocab_size, text.hidden_size)
    embedding = f"{ours}.embedding.word_embeddings.weight"
    output = f"{ours}.output_layer.weight"
    tied = text.tie_word_embeddings
    names = (embedding, output) if tied else (embedding,)
    rows = [Row(names, (Source(_embedding(theirs), vocabulary),), Split.COLUMN)]
    if not tied:
        rows.append(row(output, head, shape=vocabulary, split=Split.COLUMN))
    return rows


def swiglu_rows(
    layer: str,
    theirs: str,
    *,
    hidden: int,
    ffn: int,
    count: int,
    bias: bool,
    mlp: str = "mlp",
) -> list[Row]:
    """A gated MLP: gate and up in one projection, then down; ``mlp`` is its name in the layer."""
    ours = f"{layer}{mlp}"
    rows: list[Row] = []
    for kind, width in (("weight", (hidden,)), *([("bias", ())] if bias else [])):
        gate_up = tuple(
            Source(f"{theirs}.{part}_proj.{kind}", (ffn, *width)) for part in ("gate", "up")
        )
        rows.append(Row((f"{ours}.linear_fc1.{kind}",), gate_up, Split.COLUMN, count=count))
    names = f"{ours}.linear_fc2", f"{theirs}.down_proj"
    down = linear(*names, shape=(hidden, ffn), split=Split.ROW, count=count, bias=bias)
    return [*rows, *down]


def twins(text: TextArchitecture, *, theirs: str, head: str = HEAD) -> dict[str, str]:
    """Some files of tied models have the output layer's weight as well."""
    return {head: _embedding(theirs)} if text.tie_word_embeddings else {}


def _embedding(theirs: str) -> str:
    return f"{theirs}.embed_tokens.weight"


def text_values(**rope: Any) -> dict[str, Any]:
    """What config.json says of every decoder here, with what a family adds to rope."""
    return {"hidden_act": "silu", "rope_parameters": {"rope_type": "default", **rope}}


def head_size(text: Any) -> dict[str, Any]:
    """Where config.json has no key for the size of a head: hidden size over heads."""
    return {"kv_channels": text.hidden_size // text.num_attention_heads}


def vision_values(activation: str) -> dict[str, Any]:
    """What config.json says of every encoder over patches with 2D rope."""
    return {"hidden_act": activation, "rope_parameters": {"rope_type": "axial"}}


def fixed_epsilon(
    module: EncoderArchitecture | ProjectorArchitecture,
    *,
    ours: str,
    theirs: float = _HF_NORM_EPSILON,
) -> tuple[str, ...]:
    """The sentence for a norm's epsilon that transformers has no key for; none where it is its."""
    if module.layernorm_epsilon == theirs:
        return ()
    return (
        f"{ours}.layernorm_epsilon is {module.layernorm_epsilon}, but transformers' model "
        f"has {theirs} there; only a model with that value can be exchanged with it",
    )
