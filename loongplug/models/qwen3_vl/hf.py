"""Qwen3-VL's modules on the Hugging Face side: tensor names, and their parts of config.json."""

from functools import partial

from loongplug.models.architecture import (
    HEAD,
    ProjectorArchitecture,
    TextArchitecture,
    VisionArchitecture,
)
from loongplug.models.hf_encoder_rows import layer_rows
from loongplug.models.hf_mapping import Row
from loongplug.models.hf_model import HuggingFacePart
from loongplug.models.hf_rows import (
    decoder_rows,
    dense_mlp_rows,
    fixed_epsilon,
    merger_rows,
    patch_embedding,
    row,
    text_values,
    twins,
    vision_values,
)
from loongplug.models.layer_names import LayerNames
from loongplug.models.qwen3_vl.config import Qwen3VisionConfig

_LAYER = LayerNames(
    layer="blocks.{}.",
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    proj="attn.proj",
    mlp=("mlp.linear_fc1", "mlp.linear_fc2"),
)


def encoder(vision: Qwen3VisionConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The image encoder."""
    hidden = vision.hidden_size
    return HuggingFacePart(
        rows=[
            patch_embedding(vision, ours=ours, theirs=theirs),
            row(f"{ours}.patch_embed.bias", f"{theirs}.patch_embed.proj.bias", shape=(hidden,)),
            row(
                f"{ours}.position_embedding.weight",
                f"{theirs}.pos_embed.weight",
                shape=(vision.num_position_embeddings, hidden),
            ),
            *layer_rows(vision, _LAYER, ours=ours, theirs=theirs),
        ],
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
