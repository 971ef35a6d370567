"""The Qwen2-Audio family: an encoder of sounds, a linear, any text decoder, as ``transformers``
joins them in Qwen2-Audio.
"""

from types import MappingProxyType

from loongplug.models.qwen2_audio.config import Qwen2AudioConfig
from loongplug.models.registry import ANY, WHOLE, Family, InTransformers

LOONGPLUG_FAMILIES = (
    Family(
        name="qwen2_audio",
        config_class=Qwen2AudioConfig,
        parts={"audio_encoder": "qwen2_audio", "audio_projector": "linear", "text_decoder": ANY},
        in_transformers=InTransformers(
            config_class="Qwen2AudioConfig",
            architecture="Qwen2AudioForConditionalGeneration",
            roots={
                "audio_encoder": "audio_tower",
                "audio_projector": "multi_modal_projector.linear",
                "text_decoder": "language_model.model",
            },
            head="language_model.lm_head.weight",
            prefixes=(
                ("language_model.lm_head", "lm_head"),
                ("language_model.model.", "model.language_model."),
                ("audio_tower.", "model.audio_tower."),
                ("multi_modal_projector.", "model.multi_modal_projector."),
            ),
            sections={
                "audio_config": ("audio_encoder",),
                "text_config": ("text_decoder",),
                WHOLE: ("audio_projector",),
            },
            ties=False,
        ),
        special_tokens=MappingProxyType({"audio_token_id": "<|AUDIO|>"}),
        marks=MappingProxyType(
            {"audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>"}
        ),
    ),
)
