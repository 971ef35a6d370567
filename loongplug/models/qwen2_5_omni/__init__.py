"""The Qwen2.5-Omni family: its thinker, which sees and hears, without the part that speaks."""

from types import MappingProxyType

from loongplug.models.parts import VISION_JSON, Part
from loongplug.models.qwen2_5_omni.config import OmniVisionConfig, Qwen25OmniConfig
from loongplug.models.registry import Family, InTransformers

LOONGPLUG_PARTS = (
    Part(
        name="qwen2_5_omni_vit",
        config_class=OmniVisionConfig,
        build="loongplug.models.qwen2_5_vl.vision:build_encoder",
        hugging_face="loongplug.models.qwen2_5_vl.hf:encoder_apart",
        config_json=VISION_JSON
        | {"window_size": "window_size", "full_attention_layers": "fullatt_block_indexes"},
    ),
)

LOONGPLUG_FAMILIES = (
    Family(
        name="qwen2_5_omni",
        config_class=Qwen25OmniConfig,
        parts={
            "image_encoder": "qwen2_5_omni_vit",
            "image_projector": "qwen2_5_merger",
            "audio_encoder": "qwen2_5_omni_audio",
            "audio_projector": "linear",
            "text_decoder": "qwen2_5",
        },
        in_transformers=InTransformers(
            config_class="Qwen2_5OmniThinkerConfig",
            architecture="Qwen2_5OmniThinkerForConditionalGeneration",
            roots={
                "image_encoder": "visual",
                "image_projector": "visual",
                "audio_encoder": "audio_tower",
                "audio_projector": "audio_tower.proj",
                "text_decoder": "model",
            },
            sections={
                "text_config": ("text_decoder",),
                "vision_config": ("image_encoder", "image_projector"),
                "audio_config": ("audio_encoder", "audio_projector"),
            },
            whole={"image_encoder": {"tokens_per_second": "position_id_per_seconds"}},
            prefixes=(
                ("visual.", "model.visual."),
                ("audio_tower.", "model.audio_tower."),
                ("model.", "model.language_model."),
            ),
            formerly=(("thinker.", ""),),
            within={"qwen2_5_omni": "thinker_config"},
            aside=("talker.", "token2wav."),
        ),
        special_tokens=MappingProxyType(
            {
                "image_token_id": "<|IMAGE|>",
                "video_token_id": "<|VIDEO|>",
                "audio_token_id": "<|AUDIO|>",
                "vision_start_token_id": "<|vision_bos|>",
                "vision_end_token_id": "<|vision_eos|>",
                "audio_start_token_id": "<|audio_bos|>",
                "audio_end_token_id": "<|audio_eos|>",
            }
        ),
    ),
)
