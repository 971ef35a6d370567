"""Vision transformers over a fixed grid of patches, CLIP's, SigLIP's, DINOv2's and InternVL's:
config classes, and what each kind's files call its tensors.

One encoder, which data drive; projectors and decoders are other parts'.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from loongplug.models.architecture import SquareVisionArchitecture
from loongplug.models.hf_mapping import Shape
from loongplug.models.hf_rows import LayerNames
from loongplug.models.parts import Part


@dataclass(frozen=True, kw_only=True)
class TowerNames(LayerNames):
    """One kind's names; None and False stand for what it does not have.

    Names that end in a tensor are whole; to the others ``.weight`` and ``.bias`` are added.
    ``batched``: class token and positions have axes of length one in front, so that they are
    [1, tokens, hidden].
    """

    patches: str
    patches_bias: bool = True
    positions: str  # whole
    class_token: str | None = None  # whole
    batched: bool = False
    pre_norm: str | None = None
    final_norm: str
    features_have_norm: bool = True  # False: transformers norms the pooled class token alone
    layer_scales: tuple[str, str] | None = None  # whole; of attention, of the MLP


CLIP = TowerNames(
    patches="embeddings.patch_embedding",
    patches_bias=False,
    positions="embeddings.position_embedding.weight",
    class_token="embeddings.class_embedding",
    pre_norm="pre_layrnorm",
    final_norm="post_layernorm",
    features_have_norm=False,
    layer="encoder.layers.{}.",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.out_proj",
    mlp=("mlp.fc1", "mlp.fc2"),
)
SIGLIP = replace(
    CLIP,
    patches_bias=True,
    class_token=None,
    pre_norm=None,
    features_have_norm=True,
)
DINOV2 = TowerNames(
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    batched=True,
    final_norm="layernorm",
    layer="encoder.layer.{}.",
    norms=("norm1", "norm2"),
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    proj="attention.output.dense",
    mlp=("mlp.fc1", "mlp.fc2"),
    layer_scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
)
INTERN = replace(
    DINOV2,
    norms=("layernorm_before", "layernorm_after"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    proj="attention.projection_layer",
    layer_scales=("lambda_1", "lambda_2"),
)


@dataclass(frozen=True, kw_only=True)
class PatchTransformerConfig(SquareVisionArchitecture):
    """A ViT over square images of one size, with a learned table of positions.

    ``names``, fixed for a kind, says what it has and what the files call that. ``final_norm``: the
    feature layer's output goes through the norm behind the last layer.
    """

    names: ClassVar[TowerNames]
    activation: str = "gelu"  # quick_gelu, gelu or gelu_pytorch_tanh
    final_norm: bool = False

    def has_class_token(self) -> bool:
        """Whether the kind has one."""
        return self.names.class_token is not None

    @property
    def norms_features(self) -> bool:
        """Whether the features go through the final norm."""
        return self.final_norm and self.computed_layers == self.num_layers

    def other_tensors(self) -> Mapping[str, Shape]:
        """Tensors of the files besides embeddings, layers and norms, which nothing here runs."""
        return {}

    def has_final_norm(self) -> bool:
        """Whether the files have a norm behind the last layer."""
        return True


@dataclass(frozen=True, kw_only=True)
class ClipVisionConfig(PatchTransformerConfig):
    """CLIP's: a class token, a norm before the layers too."""

    names: ClassVar[TowerNames] = CLIP
    activation: str = "quick_gelu"
    layernorm_epsilon: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class SiglipVisionConfig(PatchTransformerConfig):
    """SigLIP's and fixed-size SigLIP 2's: patches only. ``head``: the files have the pooling."""

    names: ClassVar[TowerNames] = SIGLIP
    activation: str = "gelu_pytorch_tanh"
    head: bool = True

    def other_tensors(self) -> Mapping[str, Shape]:
        """The attention pooling's."""
        if not self.head:
            return {}
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        return {
            "head.probe": (1, 1, hidden),
            "head.attention.in_proj_weight": (3 * hidden, hidden),
            "head.attention.in_proj_bias": (3 * hidden,),
            "head.attention.out_proj.weight": (hidden, hidden),
            "head.attention.out_proj.bias": (hidden,),
            "head.layernorm.weight": (hidden,),
            "head.layernorm.bias": (hidden,),
            "head.mlp.fc1.weight": (ffn, hidden),
            "head.mlp.fc1.bias": (ffn,),
            "head.mlp.fc2.weight": (hidden, ffn),
            "head.mlp.fc2.bias": (hidden,),
        }


@dataclass(frozen=True, kw_only=True)
class Dinov2VisionConfig(PatchTransformerConfig):
    """DINOv2's without SwiGLU: a class token and layer scale, which starts at ``layer_scale``."""

    names: ClassVar[TowerNames] = DINOV2
    layer_scale: float = 1.0
    mask_token: bool = True  # the files have it

    def other_tensors(self) -> Mapping[str, Shape]:
        """The token that stood for masked patches."""
        return {"embeddings.mask_token": (1, self.hidden_size)} if self.mask_token else {}


@dataclass(frozen=True, kw_only=True)
class InternVisionConfig(PatchTransformerConfig):
    """InternViT-300M as InternVL has it: a class token and layer scale, from ``layer_scale``.

    Its files have a final norm exactly where it is used: with ``final_norm``.
    """

    names: ClassVar[TowerNames] = INTERN
    patch_size: int = 14
    image_size: int = 448
    spatial_merge_size: int = 2
    layer_scale: float = 0.1
    mask_token: bool = False  # the files have it

    def other_tensors(self) -> Mapping[str, Shape]:
        """The token that stood for masked patches."""
        return {"embeddings.mask_token": (1, 1, self.hidden_size)} if self.mask_token else {}

    def has_final_norm(self) -> bool:
        """Whether ``final_norm`` is set."""
        return self.final_norm


_HF = "loongplug.models.patch_transformer.hf"
_part = partial(
    Part,
    build="loongplug.models.patch_transformer.encoder:build_encoder",
    hugging_face=f"{_HF}:encoder",
)
_JSON = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "in_channels": "num_channels",
    "layernorm_epsilon": "layer_norm_eps",
    "activation": "hidden_act",
    "initializer_range": "initializer_range",
}
_FFN = {"ffn_hidden_size": "intermediate_size"}
_SQUARES = {"image_size": "image_size", "patch_size": "patch_size"}

LOONGPLUG_PARTS = (
    _part(
        name="clip_vit",
        config_class=ClipVisionConfig,
        config_json=_JSON | _FFN | _SQUARES,
        model_type="clip_vision_model",
    ),
    _part(
        name="siglip_vit",
        config_class=SiglipVisionConfig,
        config_json=_JSON | _FFN | _SQUARES | {"head": "vision_use_head"},
        model_type="siglip_vision_model",
    ),
    _part(
        name="dinov2_vit",
        config_class=Dinov2VisionConfig,
        config_json=_JSON
        | _SQUARES
        | {"layer_scale": "layerscale_value", "mask_token": "use_mask_token"},
        derived=f"{_HF}:mlp_width",
        unused=("layerscale_value",),
        model_type="dinov2",
    ),
    _part(
        name="intern_vit",
        config_class=InternVisionConfig,
        config_json=_JSON
        | _FFN
        | {"layer_scale": "layer_scale_init_value", "mask_token": "use_mask_token"},
        derived=f"{_HF}:of_internvl",
        unused=("layer_scale_init_value",),
        model_type="internvl_vision",
    ),
)
