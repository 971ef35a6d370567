"""The Qwen3-VL family: config classes, names of tensors and keys of config.json of its image
encoder, projector and decoder.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from loongplug.models.architecture import (
    MultimodalTextArchitecture,
    ProjectorArchitecture,
    RotaryVisionArchitecture,
    TextArchitecture,
    VisionArchitecture,
    VisionLanguageArchitecture,
)
from loongplug.models.family import (
    QWEN_VISION_TOKENS,
    Family,
    HuggingFacePart,
    InTransformers,
    fixed_epsilon,
)
from loongplug.models.hf_rows import (
    LayerNames,
    Table,
    layer_rows,
    merger_rows,
    patch_embedding,
    text_decoder,
    vision_values,
)
from loongplug.models.parts import MULTIMODAL_TEXT_JSON, VISION_JSON, DecoderPart, Part


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig(RotaryVisionArchitecture):
    """The ViT: 3D patch embedding, interpolated position table, 2D rope, LayerNorm, GELU MLP."""

    num_position_embeddings: int  # a square number: the learned grid
    patch_size: int = 16
    deepstack_layers: tuple[int, ...] = ()  # 0-based layers whose output is tapped

    def taps(self) -> tuple[int, ...]:
        """The layers of ``deepstack_layers``."""
        return self.deepstack_layers


@dataclass(frozen=True, kw_only=True)
class Qwen3ProjectorConfig(ProjectorArchitecture):
    """The patch merger and one deepstack merger per tapped layer; sizes follow its neighbours."""


@dataclass(frozen=True, kw_only=True)
class Qwen3DecoderConfig(MultimodalTextArchitecture):
    """The text decoder: GQA with q/k norm, RMSNorm, SwiGLU, interleaved mRoPE."""

    interleaved_mrope: ClassVar[bool] = True
    rotary_base: float = 5_000_000.0
    max_position_embeddings: int = 262_144


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(VisionLanguageArchitecture):
    """A whole Qwen3-VL: encoder, projector, decoder, and the ids of its special tokens."""

    image_encoder: Qwen3VisionConfig
    image_projector: Qwen3ProjectorConfig
    foundation: Qwen3DecoderConfig


_LAYER = LayerNames(
    layer="blocks.{}.",
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    proj="attn.proj",
    mlp=("mlp.linear_fc1", "mlp.linear_fc2"),
)


def encoder(vision: Qwen3VisionConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The image encoder."""
    whole, hidden = Table(f"{ours}.", f"{theirs}."), vision.hidden_size
    return HuggingFacePart(
        rows=[
            patch_embedding(vision, ours=ours, theirs=theirs),
            whole.row("patch_embed.bias", "patch_embed.proj.bias", (hidden,)),
            whole.row(
                "position_embedding.weight",
                "pos_embed.weight",
                (vision.num_position_embeddings, hidden),
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
    deepstack = f"{ours}.deepstack.{{}}.", f"{theirs}.deepstack_merger_list.{{}}."
    return HuggingFacePart(
        rows=[
            *merger(Table(f"{ours}.merger.", f"{theirs}.merger.")),
            # A deepstack merger norms merged patches, the last layer's merger single ones.
            *merger(Table(*deepstack, len(vision.taps())), norm_blocks=True),
        ],
        values={"out_hidden_size": out},
        inexpressible=fixed_epsilon(projector, ours=ours),
    )


def decoder(text: TextArchitecture, **names: Any) -> HuggingFacePart:
    """The text decoder."""
    return text_decoder(text, qk_norm=True, rope={"mrope_interleaved": True}, **names)


LOONGPLUG_PARTS = (
    Part(
        name="qwen3_vit",
        config_class=Qwen3VisionConfig,
        build="loongplug.models.qwen3_vl.vision:build_encoder",
        hugging_face="loongplug.models.qwen3_vl:encoder",
        config_json=VISION_JSON
        | {
            "num_position_embeddings": "num_position_embeddings",
            "deepstack_layers": "deepstack_visual_indexes",
        },
    ),
    Part(
        name="qwen3_merger",
        config_class=Qwen3ProjectorConfig,
        build="loongplug.models.qwen3_vl.vision:build_projector",
        hugging_face="loongplug.models.qwen3_vl:projector",
    ),
    DecoderPart(
        name="qwen3",
        config_class=Qwen3DecoderConfig,
        hugging_face="loongplug.models.qwen3_vl:decoder",
        config_json=MULTIMODAL_TEXT_JSON | {"kv_channels": "head_dim"},
        fixed={"qk_layernorm": True, "add_qkv_bias": False},
    ),
)

ROOTS = {
    "image_encoder": "model.visual",
    "image_projector": "model.visual",
    "text_decoder": "model.language_model",
}
LOONGPLUG_FAMILIES = (
    Family(
        name="qwen3_vl",
        config_class=Qwen3VLConfig,
        parts={
            "image_encoder": "qwen3_vit",
            "image_projector": "qwen3_merger",
            "text_decoder": "qwen3",
        },
        in_transformers=InTransformers(
            config_class="Qwen3VLConfig",
            architecture="Qwen3VLForConditionalGeneration",
            roots=ROOTS,
        ),
        special_tokens=QWEN_VISION_TOKENS,
    ),
)
