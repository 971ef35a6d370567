"""What the files of each kind of tower call its tensors, behind the tower's root."""

from dataclasses import dataclass, replace

from loongplug.models.layer_names import LayerNames


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
