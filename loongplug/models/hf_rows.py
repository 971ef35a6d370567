"""Rows of the Hugging Face mapping that parts share: Megatron's layers, encoders, the text decoder.

Everywhere ``ours`` is the module's name in the built model, and ``theirs`` how the names of its
tensors begin in the files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from loongplug.models.architecture import EncoderArchitecture, TextArchitecture, VisionArchitecture
from loongplug.models.family import HuggingFacePart
from loongplug.models.hf_mapping import (
    CARRIED,
    HEAD,
    Row,
    Shape,
    Source,
    Split,
    leading_axes,
    parameter_name,
)


@dataclass(frozen=True)
class Table:
    """Makes rows whose names begin alike: with ``ours`` in our model, with ``theirs`` in the files.

    Both end in a dot where a name follows. With a ``count`` rows are of that many layers, whose
    number stands for ``{}``. Methods take our name, then theirs, each behind its beginning.
    """

    ours: str
    theirs: str
    count: int | None = None

    def source(self, theirs: str, shape: Shape, **layout: Any) -> Source:
        """A tensor there, with ``layout`` as in :class:`Source`."""
        return Source(f"{self.theirs}{theirs}", shape, **layout)

    def row(
        self,
        ours: str,
        theirs: str,
        shape: Shape,
        *,
        split: Split = Split.NONE,
        leading: int = 0,
        folded: bool = True,
    ) -> Row:
        """One tensor as it is; ``leading`` as in :class:`Source`, ``folded`` as in :class:`Row`."""
        source = self.source(theirs, shape, leading=leading)
        return Row((f"{self.ours}{ours}",), (source,), split, count=self.count, folded=folded)

    def linear(
        self, ours: str, theirs: str, shape: tuple[int, int], *, split: Split, bias: bool = True
    ) -> list[Row]:
        """Weight and bias; split by inputs, it has its bias whole, added after the reduction."""
        rows = [self.row(f"{ours}.weight", f"{theirs}.weight", shape, split=split)]
        if bias:
            of_bias = Split.COLUMN if split is Split.COLUMN else Split.NONE
            rows.append(self.row(f"{ours}.bias", f"{theirs}.bias", shape[:1], split=of_bias))
        return rows

    def norm(self, ours: str, theirs: str, width: int, *, bias: bool = True) -> list[Row]:
        """A norm's weight, and its bias if it has one."""
        return [self.row(f"{ours}.{k}", f"{theirs}.{k}", (width,)) for k in _kinds(bias)]

    def layer_norms(self, attention: str, mlp: str, width: int, *, bias: bool = True) -> list[Row]:
        """Norms before attention and MLP; TransformerEngine keeps each within the linear behind it,
        but for one before experts.
        """
        return [
            Row(
                (f"{self.ours}{ours}.{kind}", f"{self.ours}{behind}.layer_norm_{kind}"),
                (self.source(f"{theirs}.{kind}", (width,)),),
                count=self.count,
            )
            for ours, behind, theirs in (
                ("input_layernorm", "self_attention.linear_qkv", attention),
                ("pre_mlp_layernorm", "mlp.linear_fc1", mlp),
            )
            for kind in _kinds(bias)
        ]

    def together(
        self,
        ours: str,
        theirs: Mapping[str, int],
        *,
        inputs: int,
        groups: int = 1,
        parts: int = 1,
        bias: bool = True,
        without_bias: str | None = None,
    ) -> list[Row]:
        """One linear of several there, by columns; ``theirs`` has the outputs of each.

        Each is so many ``parts`` already. ``groups`` as in :class:`Row`. The files have no bias of
        ``without_bias``; ours is zero.
        """
        return [
            Row(
                (f"{self.ours}{ours}.{kind}",),
                tuple(
                    self.source(
                        f"{name}.{kind}",
                        (outputs, inputs) if kind == "weight" else (outputs,),
                        parts=parts,
                        absent=kind == "bias" and name == without_bias,
                    )
                    for name, outputs in theirs.items()
                ),
                Split.COLUMN,
                groups=groups,
                count=self.count,
            )
            for kind in _kinds(bias)
        ]

    def qkv(
        self, theirs: tuple[str, ...], hidden: int, *, heads: int, without_bias: str | None = None
    ) -> list[Row]:
        """An encoder's queries, keys and values; ``theirs`` are three names, or one."""
        parts = 3 // len(theirs)
        return self.together(
            "self_attention.linear_qkv",
            dict.fromkeys(theirs, parts * hidden),
            inputs=hidden,
            groups=heads,
            parts=parts,
            without_bias=without_bias,
        )

    def swiglu(
        self, theirs: str, *, hidden: int, ffn: int, bias: bool, ours: str = "mlp"
    ) -> list[Row]:
        """A gated MLP: gate and up in one linear, then down."""
        gate_up = {f"{theirs}.gate_proj": ffn, f"{theirs}.up_proj": ffn}
        names = f"{ours}.linear_fc2", f"{theirs}.down_proj"
        return [
            *self.together(f"{ours}.linear_fc1", gate_up, inputs=hidden, bias=bias),
            *self.linear(*names, (hidden, ffn), split=Split.ROW, bias=bias),
        ]

    def two_linears(
        self, theirs: tuple[str, str], sizes: tuple[int, int, int], *, bias: bool = True
    ) -> list[Row]:
        """A projector's MLP, from the first of ``sizes`` into the last."""
        width, inner, out = sizes
        first, second = theirs
        return [
            *self.linear("linear_fc1", first, (inner, width), split=Split.COLUMN, bias=bias),
            *self.linear("linear_fc2", second, (out, inner), split=Split.ROW, bias=bias),
        ]

    def experts(
        self,
        linear: str,
        theirs: Mapping[str, Shape],
        *,
        split: Split,
        count: int,
        in_model: tuple[Source, ...] = (),
        **layout: Any,
    ) -> Row:
        """One linear of ``count`` experts, with ``in_model`` as in :class:`Row`."""
        ours = f"{self.ours}mlp.experts"
        names = (
            f"{ours}.local_experts.{{expert}}.{linear}.weight",  # one after the other
            f"{ours}.{linear}.weight{{expert}}",  # TransformerEngine's grouped GEMM
        )
        sources = tuple(self.source(name, shape, **layout) for name, shape in theirs.items())
        return Row(names, sources, split, count=self.count, experts=count, in_model=in_model)


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def encoder_layers(encoder: EncoderArchitecture, *, ours: str, theirs: str) -> Table:
    """The table of an encoder's layers that run; ``theirs`` has ``{}`` for the number."""
    return Table(f"{ours}.blocks.layers.{{}}.", theirs, encoder.computed_layers)


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """What the files of one kind of encoder call the tensors of one layer.

    ``.weight`` and ``.bias`` are added to the names. ``layer`` is how they begin behind the
    encoder's root, with ``{}`` for the layer's number; the others are behind it. ``qkv`` has three
    names, or one where queries, keys and values are one tensor.
    """

    layer: str
    norms: tuple[str, str]  # before attention, before the MLP
    qkv: tuple[str, ...]
    proj: str
    mlp: tuple[str, str]


def layer_rows(
    encoder: EncoderArchitecture,
    names: LayerNames,
    *,
    ours: str,
    theirs: str,
    key_bias: bool = True,
) -> list[Row]:
    """Rows of the layers that run: two norms, attention and an MLP of two linears, with biases.

    Without ``key_bias`` the files have none for the keys; ours is zero.
    """
    layer = encoder_layers(encoder, ours=ours, theirs=f"{theirs}.{names.layer}")
    hidden, ffn = encoder.hidden_size, encoder.ffn_hidden_size
    first, second = names.mlp
    return [
        *layer.layer_norms(*names.norms, hidden),
        *layer.qkv(
            names.qkv,
            hidden,
            heads=encoder.num_attention_heads,
            without_bias=None if key_bias else names.qkv[1],
        ),
        *layer.linear("self_attention.linear_proj", names.proj, (hidden, hidden), split=Split.ROW),
        *layer.linear("mlp.linear_fc1", first, (ffn, hidden), split=Split.COLUMN),
        *layer.linear("mlp.linear_fc2", second, (hidden, ffn), split=Split.ROW),
    ]


def carried_rows(tensors: Mapping[str, Shape], *, ours: str, theirs: str) -> list[Row]:
    """Rows of a :class:`~loongplug.models.encoder.Carried` with these tensors."""
    table = Table(f"{ours}.{CARRIED}.", f"{theirs}.")
    return [
        table.row(parameter_name(name), name, shape, leading=leading_axes(shape))
        for name, shape in tensors.items()
    ]


def patch_embedding(vision: VisionArchitecture, *, ours: str, theirs: str) -> Row:
    """The weight of a patch embedding: a 3D convolution there, whose stride is its kernel."""
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    names = f"{ours}.patch_embed.weight", f"{theirs}.patch_embed.proj.weight"
    return Table("", "").row(*names, (vision.hidden_size, *patch))


def merger_rows(
    table: Table,
    *,
    vision: VisionArchitecture,
    out: int,
    norm: str,
    linears: tuple[str, str],
    norm_bias: bool = True,
    norm_blocks: bool = False,
) -> list[Row]:
    """A patch merger into the width ``out``; ``norm`` and ``linears`` are the files' names of both.

    With ``norm_blocks``, merged patches are normed.
    """
    merged = vision.hidden_size * vision.spatial_merge_size**2
    return [
        *table.norm("norm", norm, merged if norm_blocks else vision.hidden_size, bias=norm_bias),
        *table.two_linears(linears, (merged, merged, out)),
    ]


def text_decoder(
    text: TextArchitecture,
    *,
    ours: str,
    theirs: str,
    head: str = HEAD,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    mlps: Callable[[Table], list[Row]] | None = None,
    rope: Mapping[str, Any] = MappingProxyType({}),
    values: Mapping[str, Any] = MappingProxyType({}),
    **lacks: tuple[str, ...],
) -> HuggingFacePart:
    """A whole text decoder; ``head`` is the name of the output layer's weight in the files.

    ``mlps`` makes rows of a layer's MLPs where they are not gated ones. ``values``, and ``rope``
    for its section, are what config.json says besides; ``lacks`` as in :class:`HuggingFacePart`.
    """
    hidden, channels = text.hidden_size, text.kv_channels
    query, key = text.num_attention_heads * channels, text.num_query_groups * channels
    layer = Table(f"{ours}.decoder.layers.{{}}.", f"{theirs}.layers.{{}}.", text.num_layers)
    embedding, tied = f"{theirs}.embed_tokens.weight", text.tie_word_embeddings
    # Tied, the last stage's output layer is a second copy of the embedding.
    own = f"{ours}.embedding.word_embeddings.weight", f"{ours}.output_layer.weight"
    kept = [(own, embedding)] if tied else [(own[:1], embedding), (own[1:], head)]
    vocabulary = (text.vocab_size, hidden)
    rows = [
        *(Row(names, (Source(name, vocabulary),), Split.COLUMN) for names, name in kept),
        *layer.layer_norms("input_layernorm", "post_attention_layernorm", hidden, bias=False),
        *layer.together(
            "self_attention.linear_qkv",
            {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key},
            inputs=hidden,
            groups=text.num_query_groups,
            bias=qkv_bias,
        ),
        *layer.linear(
            "self_attention.linear_proj",
            "self_attn.o_proj",
            (hidden, query),
            split=Split.ROW,
            bias=False,
        ),
        *Table(f"{ours}.", f"{theirs}.").norm(
            "decoder.final_layernorm", "norm", hidden, bias=False
        ),
    ]
    for each in ("q", "k") if qk_norm else ():
        names = f"self_attention.{each}_layernorm", f"self_attn.{each}_norm"
        rows += layer.norm(*names, channels, bias=False)
    if mlps is None:
        rows += layer.swiglu("mlp", hidden=hidden, ffn=text.ffn_hidden_size, bias=False)
    else:
        rows += mlps(layer)
    return HuggingFacePart(
        rows=rows,
        values={
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", **rope},
            **values,
        },
        # Some files of tied models have the output layer's weight as well.
        twins={head: embedding} if tied else {},
        **lacks,
    )


def head_size(text: Any) -> dict[str, Any]:
    """The size of a head, where config.json has no key for it: hidden size over heads."""
    return {"kv_channels": text.hidden_size // text.num_attention_heads}


def vision_values(activation: str) -> dict[str, Any]:
    """Values of config.json of every encoder over patches with 2D rope."""
    return {"hidden_act": activation, "rope_parameters": {"rope_type": "axial"}}
