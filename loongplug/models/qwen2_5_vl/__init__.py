"""The Qwen2.5-VL family: image encoder with window attention, projector and decoder with their
config classes and Hugging Face names. What other families can use as well lives one folder up.
"""

from loongplug.models.parts import MULTIMODAL_TEXT_JSON, VISION_JSON, DecoderPart, Part
from loongplug.models.qwen2_5_vl.config import (
    Qwen25DecoderConfig,
    Qwen25ProjectorConfig,
    Qwen25VisionConfig,
    Qwen25VLConfig,
)
from loongplug.models.registry import QWEN_VISION_TOKENS, Family, InTransformers

LOONGPLUG_PARTS = (
    Part(
        name="qwen2_5_vit",
        config_class=Qwen25VisionConfig,
        build="loongplug.models.qwen2_5_vl.vision:build_encoder",
        hugging_face="loongplug.models.qwen2_5_vl.hf:encoder",
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
        hugging_face="loongplug.models.qwen2_5_vl.hf:projector",
    ),
    DecoderPart(
        name="qwen2_5",
        config_class=Qwen25DecoderConfig,
        hugging_face="loongplug.models.qwen2_5_vl.hf:decoder",
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
