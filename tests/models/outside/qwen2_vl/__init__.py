"""Qwen2-VL as a family from outside the package: all of it is in this folder. Images only."""

from pathlib import Path

from loongplug.models.architecture import ProjectorArchitecture
from loongplug.models.family import QWEN_VISION_TOKENS, Family, InTransformers
from loongplug.models.parts import MULTIMODAL_TEXT_JSON, VISION_JSON, DecoderPart, Part
from qwen2_vl.config import Qwen2DecoderConfig, Qwen2VisionConfig, Qwen2VLConfig

LOONGPLUG_PARTS = (
    Part(
        name="qwen2_vit",
        config_class=Qwen2VisionConfig,
        build="qwen2_vl.model:build_encoder",
        hugging_face="qwen2_vl.hf:encoder",
        config_json={name: key for name, key in VISION_JSON.items() if name != "ffn_hidden_size"}
        | {"hidden_size": "embed_dim"},
        derived="qwen2_vl.hf:mlp_width",
    ),
    Part(
        name="qwen2_merger",
        config_class=ProjectorArchitecture,
        build="qwen2_vl.model:build_projector",
        hugging_face="qwen2_vl.hf:projector",
    ),
    DecoderPart(
        name="qwen2",
        config_class=Qwen2DecoderConfig,
        hugging_face="qwen2_vl.hf:decoder",
        config_json=MULTIMODAL_TEXT_JSON,
        derived="loongplug.models.hf_rows:head_size",
        fixed={"qk_layernorm": False, "add_qkv_bias": True},
    ),
)

FAMILY = Family(
    name="qwen2_vl",
    config_class=Qwen2VLConfig,
    parts={
        "image_encoder": "qwen2_vit",
        "image_projector": "qwen2_merger",
        "text_decoder": "qwen2",
    },
    in_transformers=InTransformers(
        config_class="Qwen2VLConfig",
        architecture="Qwen2VLForConditionalGeneration",
        roots={"image_encoder": "visual", "image_projector": "visual", "text_decoder": "model"},
        sections={
            "text_config": ("text_decoder",),
            "vision_config": ("image_encoder", "image_projector"),
        },
    ),
    special_tokens=QWEN_VISION_TOKENS,
    configs=Path(__file__).parent,
)

LOONGPLUG_FAMILIES = (FAMILY,)
