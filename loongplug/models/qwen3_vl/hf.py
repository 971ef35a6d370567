"""Qwen3-VL's modules on the Hugging Face side: tensor names, and their parts of config.json."""

from functools import partial

from loongplug.models.architecture import (
    HEAD,
    ProjectorArchitecture,
    TextArchitecture,
    VisionArchitecture,
)
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
    row,
    text_values,
    twins,
    vision_values,
)
from loongplug.models.qwen3_vl.config import Qwen3VisionConfig


def encoder(vision: Qwen3VisionConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The image encoder."""
    return HuggingFacePart(
        rows=_encoder_rows(vision, ours=ours, theirs=theirs),
        values=vision_values("gelu_pytorch_tanh"),
        inexpressible=fixed_epsilon(vision, ours=ours),
    )


def projector(
    projector: ProjectorArchitecture,
    *,
    vision: VisionArchitecture,
    out: int,
    ours: str,
    theirs: str,
) -> HuggingFacePart:
    """The merger and the deepstack mergers, into the decoder's width ``out``."""
    merger = partial(
        merger_rows, vision=vision, out=out, norm="norm", linears=("linear_fc1", "linear_fc2")
    )
    return HuggingFacePart(
        rows=[
            *merger(f"{ours}.merger", f"{theirs}.merger"),
            # A deepstack merger norms merged patches, the last layer's merger single ones.
            *merger(
                f"{ours}.deepstack.{{}}",
                f"{theirs}.deepstack_merger_list.{{}}",
                norm_blocks=True,
                count=len(vision.taps()),
            ),
        ],
        values={"out_hidden_size": out},
        inexpressible=fixed_epsilon(projector, ours=ours),
    )


def decoder(text: TextArchitecture, *, ours: str, theirs: str, head: str = HEAD) -> HuggingFacePart:
    """The text decoder."""
    return HuggingFacePart(
        rows=[
            *attention_rows(text, ours=ours, theirs=theirs, head=head),
            *dense_mlp_rows(text, ours=ours, theirs=theirs),
        ],
        values=text_values(mrope_interleaved=True),
        twins=twins(text, theirs=theirs, head=head),
    )


def attention_rows(text: TextArchitecture, *, ours: str, theirs: str, head: str) -> list[Row]:
    """The text decoder but for what stands in its MLPs."""
    return decoder_rows(text, ours=ours, theirs=theirs, qkv_bias=False, qk_norm=True, head=head)


def _encoder_rows(vision: Qwen3VisionConfig, *, ours: str, theirs: str) -> list[Row]:
    layer, their_layer = encoder_layer(ours), f"{theirs}.blocks.{{}}."
    hidden, ffn, count = vision.hidden_size, vision.ffn_hidden_size, vision.num_layers
    rows = [
        patch_embedding(vision, ours=ours, theirs=theirs),
        row(f"{ours}.patch_embed.bias", f"{theirs}.patch_embed.proj.bias", shape=(hidden,)),
        row(
            f"{ours}.position_embedding.weight",
            f"{theirs}.pos_embed.weight",
            shape=(vision.num_position_embeddings, hidden),
        ),
    ]
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
        ("mlp.linear_fc1", "mlp.linear_fc1", Split.COLUMN, (ffn, hidden)),
        ("mlp.linear_fc2", "mlp.linear_fc2", Split.ROW, (hidden, ffn)),
    ):
        rows += linear(
            f"{layer}{own}", f"{their_layer}{other}", shape=shape, split=split, count=count
        )
    return rows
