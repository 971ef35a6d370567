"""Vision transformers over a fixed grid of patches: CLIP's, SigLIP's, DINOv2's and InternVL's.

One encoder, which data drive; projectors and decoders are other parts'.
"""

from loongplug.models.parts import Part
from loongplug.models.patch_transformer.config import (
    ClipVisionConfig,
    Dinov2VisionConfig,
    InternVisionConfig,
    SiglipVisionConfig,
)

_BUILD = "loongplug.models.patch_transformer.encoder:build_encoder"
_HUGGING_FACE = "loongplug.models.patch_transformer.hf:encoder"
_JSON = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "in_channels": "num_channels",
    "layernorm_epsilon": "layer_norm_eps",
    "activation": "hidden_act",
}
_FFN = {"ffn_hidden_size": "intermediate_size"}
_SQUARES = {"image_size": "image_size", "patch_size": "patch_size"}
_START = {"initializer_range": "initializer_range"}

LOONGPLUG_PARTS = (
    Part(
        name="clip_vit",
        config_class=ClipVisionConfig,
        build=_BUILD,
        hugging_face=_HUGGING_FACE,
        config_json=_JSON | _FFN | _SQUARES | _START,
        model_type="clip_vision_model",
    ),
    Part(
        name="siglip_vit",
        config_class=SiglipVisionConfig,
        build=_BUILD,
        hugging_face=_HUGGING_FACE,
        config_json=_JSON | _FFN | _SQUARES | _START | {"head": "vision_use_head"},
        model_type="siglip_vision_model",
    ),
    Part(
        name="dinov2_vit",
        config_class=Dinov2VisionConfig,
        build=_BUILD,
        hugging_face=_HUGGING_FACE,
        config_json=_JSON
        | _SQUARES
        | _START
        | {"layer_scale": "layerscale_value", "mask_token": "use_mask_token"},
        derived="loongplug.models.patch_transformer.hf:mlp_width",
        unused=("layerscale_value",),
        model_type="dinov2",
    ),
    Part(
        name="intern_vit",
        config_class=InternVisionConfig,
        build=_BUILD,
        hugging_face=_HUGGING_FACE,
        config_json=_JSON
        | _FFN
        | _START
        | {"layer_scale": "layer_scale_init_value", "mask_token": "use_mask_token"},
        derived="loongplug.models.patch_transformer.hf:of_internvl",
        unused=("layer_scale_init_value",),
        model_type="internvl_vision",
    ),
)
