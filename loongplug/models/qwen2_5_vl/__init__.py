"""The Qwen2.5-VL family: config classes, names of tensors and keys of config.json of its image
encoder, which has window attention, its projector and its decoder.

The names are those of the published files, which ``transformers`` writes as well; its modules are
called otherwise (``model.visual``, ``model.language_model``).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from loongplug.models.architecture import (
    MultimodalTextArchitecture,
    ProjectorArchitecture,
    RotaryVisionArchitecture,
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
from loongplug.models.hf_mapping import Split
from loongplug.models.hf_rows import (
    Table,
    encoder_layers,
    merger_rows,
    patch_embedding,
    text_decoder,
    vision_values,
)
from loongplug.models.parts import MULTIMODAL_TEXT_JSON, VISION_JSON, DecoderPart, Part

if TYPE_CHECKING:
    from loongplug.data.video import VideoStyle


@dataclass(frozen=True, kw_only=True)
class Qwen25VisionConfig(RotaryVisionArchitecture):
    """The ViT: 3D patch embedding, 2D rope, RMSNorm, SwiGLU, window attention in most layers."""

    mlp_matrices: ClassVar[int] = 3
    qkv: ClassVar[tuple[str, ...]] = ("attn.qkv",)  # in the files, within a layer
    full_attention_layers: tuple[int, ...]  # 0-based; all others attend within windows
    patch_size: int = 14
    window_size: int = 112  # a window's side in pixels
    tokens_per_second: int = 2  # time positions that a second of video takes

    @property
    def window_tokens(self) -> int:
        """A window's side in merged tokens."""
        return self.window_size // (self.patch_size * self.spatial_merge_size)

    def attention_window(self, layer: int) -> int | None:
        """Whole frames in the full attention layers, windows in all others."""
        whole = layer in self.full_attention_layers
        return None if whole else self.window_tokens * self.spatial_merge_size


@dataclass(frozen=True, kw_only=True)
class Qwen25ProjectorConfig(ProjectorArchitecture):
    """The patch merger with RMSNorm; its sizes follow its neighbours."""


@dataclass(frozen=True, kw_only=True)
class Qwen25DecoderConfig(MultimodalTextArchitecture):
    """The text decoder: GQA with biases on q, k and v, RMSNorm, SwiGLU, mRoPE in sections."""

    interleaved_mrope: ClassVar[bool] = False
    rotary_base: float = 1_000_000.0
    max_position_embeddings: int = 128_000


@dataclass(frozen=True, kw_only=True)
class Qwen25VLConfig(VisionLanguageArchitecture):
    """A whole Qwen2.5-VL: encoder, projector, decoder, and the ids of its special tokens."""

    image_encoder: Qwen25VisionConfig
    image_projector: Qwen25ProjectorConfig
    foundation: Qwen25DecoderConfig

    def video_style(self) -> "VideoStyle":
        """A video is one block of tokens, whose time axis counts seconds."""
        from loongplug.data.video import VideoStyle

        return VideoStyle(timestamps=False, tokens_per_second=self.image_encoder.tokens_per_second)


def encoder(vision: Qwen25VisionConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The image encoder."""
    hidden, ffn = vision.hidden_size, vision.ffn_hidden_size
    layer = encoder_layers(vision, ours=ours, theirs=f"{theirs}.blocks.{{}}.")
    proj = "self_attention.linear_proj", "attn.proj"
    return HuggingFacePart(
        rows=[
            patch_embedding(vision, ours=ours, theirs=theirs),
            *layer.layer_norms("norm1", "norm2", hidden, bias=False),
            *layer.qkv(vision.qkv, hidden, heads=vision.num_attention_heads),
            *layer.linear(*proj, (hidden, hidden), split=Split.ROW),
            *layer.swiglu("mlp", hidden=hidden, ffn=ffn, bias=True),
        ],
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
            Table(f"{ours}.merger.", f"{theirs}.merger."),
            vision=vision,
            out=out,
            norm="ln_q",
            linears=("mlp.0", "mlp.2"),
            norm_bias=False,
        ),
        values={"out_hidden_size": out},
        inexpressible=fixed_epsilon(projector, ours=ours),
    )


def decoder(text: Qwen25DecoderConfig, **names: Any) -> HuggingFacePart:
    """The text decoder."""
    return text_decoder(
        text,
        qkv_bias=True,
        values={"use_sliding_window": False},
        inexpressible=_other_head_size(text),
        **names,
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


LOONGPLUG_PARTS = (
    Part(
        name="qwen2_5_vit",
        config_class=Qwen25VisionConfig,
        build="loongplug.models.qwen2_5_vl.vision:build_encoder",
        hugging_face="loongplug.models.qwen2_5_vl:encoder",
        config_json=VISION_JSON
        | {
            "window_size": "window_size",
            "full_attention_layers": "fullatt_block_indexes",
            "tokens_per_second": "tokens_per_second",
        },
    ),
    Part(
        name="qwen2_5_merger",
        config_class=Qwen25ProjectorConfig,
        build="loongplug.models.qwen2_5_vl.vision:build_projector",
        hugging_face="loongplug.models.qwen2_5_vl:projector",
    ),
    DecoderPart(
        name="qwen2_5",
        config_class=Qwen25DecoderConfig,
        hugging_face="loongplug.models.qwen2_5_vl:decoder",
        config_json=MULTIMODAL_TEXT_JSON,
        derived="loongplug.models.hf_rows:head_size",
        fixed={"qk_layernorm": False, "add_qkv_bias": True},
    ),
)

LOONGPLUG_FAMILIES = (
    Family(
        name="qwen2_5_vl",
        config_class=Qwen25VLConfig,
        parts={
            "image_encoder": "qwen2_5_vit",
            "image_projector": "qwen2_5_merger",
            "text_decoder": "qwen2_5",
        },
        in_transformers=InTransformers(
            config_class="Qwen2_5_VLConfig",
            architecture="Qwen2_5_VLForConditionalGeneration",
            roots={
                "image_encoder": "visual",
                "image_projector": "visual",
                "text_decoder": "model",
            },
            prefixes=(("visual.", "model.visual."), ("model.", "model.language_model.")),
        ),
        special_tokens=QWEN_VISION_TOKENS,
    ),
)
