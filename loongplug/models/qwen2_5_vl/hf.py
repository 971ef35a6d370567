"""Qwen2.5-VL's modules on the Hugging Face side: tensor names, and their parts of config.json.

The names are those of the published files, which ``transformers`` writes as well; its modules are
called otherwise (``model.visual``, ``model.language_model``).
"""

from loongplug.models.architecture import HEAD, ProjectorArchitecture, VisionArchitecture
from loongplug.models.hf_encoder_rows import qkv_sources
from loongplug.models.hf_mapping import Split
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
    swiglu_rows,
    text_values,
    twins,
    vision_values,
)
from loongplug.models.qwen2_5_vl.config import Qwen25DecoderConfig, Qwen25VisionConfig


def encoder(vision: Qwen25VisionConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The image encoder, its queries, keys and values as one tensor in the files."""
    return _encoder(vision, ("attn.qkv",), ours=ours, theirs=theirs)


def encoder_apart(vision: Qwen25VisionConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The image encoder, each of these a tensor of its own."""
    return _encoder(vision, ("attn.q", "attn.k", "attn.v"), ours=ours, theirs=theirs)


def _encoder(
    vision: Qwen25VisionConfig, names: tuple[str, ...], *, ours: str, theirs: str
) -> HuggingFacePart:
    """``names``: of the tensors of queries, keys and values within a layer."""
    layer, their_layer = encoder_layer(ours), f"{theirs}.blocks.{{}}."
    hidden, count = vision.hidden_size, vision.num_layers
    rows = [
        patch_embedding(vision, ours=ours, theirs=theirs),
        *norms(
            layer,
            (f"{their_layer}norm1", f"{their_layer}norm2"),
            kind="weight",
            width=hidden,
            count=count,
        ),
        *linear(
            f"{layer}self_attention.linear_proj",
            f"{their_layer}attn.proj",
            shape=(hidden, hidden),
            split=Split.ROW,
            count=count,
        ),
        *swiglu_rows(
            layer,
            f"{their_layer}mlp",
            hidden=hidden,
            ffn=vision.ffn_hidden_size,
            count=count,
            bias=True,
        ),
    ]
    for kind in ("weight", "bias"):
        sources = qkv_sources(their_layer, names, kind=kind, hidden=hidden)
        rows.append(qkv(layer, sources, kind=kind, groups=vision.num_attention_heads, count=count))
    return HuggingFacePart(
        rows=rows,
        values=vision_values("silu"),
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
    """The merger, into the decoder's width ``out``."""
    return HuggingFacePart(
        rows=merger_rows(
            f"{ours}.merger",
            f"{theirs}.merger",
            vision=vision,
            out=out,
            norm="ln_q",
            linears=("mlp.0", "mlp.2"),
            norm_bias=False,
        ),
        values={"out_hidden_size": out},
        inexpressible=fixed_epsilon(projector, ours=ours),
    )


def decoder(
    text: Qwen25DecoderConfig, *, ours: str, theirs: str, head: str = HEAD
) -> HuggingFacePart:
    """The text decoder."""
    return HuggingFacePart(
        rows=[
            *decoder_rows(text, ours=ours, theirs=theirs, qkv_bias=True, qk_norm=False, head=head),
            *dense_mlp_rows(text, ours=ours, theirs=theirs),
        ],
        values=text_values() | {"use_sliding_window": False},
        twins=twins(text, theirs=theirs, head=head),
        inexpressible=_other_head_size(text),
    )


def _other_head_size(text: Qwen25DecoderConfig) -> tuple[str, ...]:
    """transformers has no key for the size of a head: it is hidden_size over the heads."""
    if text.kv_channels * text.num_attention_heads == text.hidden_size:
        return ()
    return (
        f"foundation.kv_channels is {text.kv_channels}, but transformers' model has hidden_size / "
        f"num_attention_heads = {text.hidden_size / text.num_attention_heads:g} there; only a "
        "model with that value can be exchanged with it",
    )
