"""The Qwen3-VL family: image encoder, projector and decoder with their config classes and Hugging
Face names. What other families can use as well lives one folder up.
"""

from loongplug.models.parts import MULTIMODAL_TEXT_JSON, VISION_JSON, DecoderPart, Part
from loongplug.models.qwen3_vl.config import (
    Qwen3DecoderConfig,
    Qwen3ProjectorConfig,
    Qwen3VisionConfig,
    Qwen3VLConfig,
)
from loongplug.models.registry import QWEN_VISION_TOKENS, Family, InTransformers

LOONGPLUG_PARTS = (
    Part(
        name="qwen3_vit",
        config_class=Qwen3VisionConfig,
        build="loongplug.models.qwen3_vl.vision:build_encoder",
        hugging_face="loongplug.models.qwen3_vl.hf:encoder",
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
        hugging_face="loongplug.models.qwen3_vl.hf:projector",
    ),
    DecoderPart(
        name="qwen3",
        config_class=Qwen3DecoderConfig,
        hugging_face="loongplug.models.qwen3_vl.hf:decoder",
        config_json=MULTIMODAL_TEXT_JSON | {"kv_channels": "head_dim"},
        fixed={"qk_layernorm": True, "add_qkv_bias": False},
    ),
)

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
            roots={
                "image_encoder": "model.visual",
                "image_projector": "model.visual",
                "text_decoder": "model.language_model",
            },
        ),
        special_tokens=QWEN_VISION_TOKENS,
    ),
)
