"""The Qwen2-Audio family: an encoder of sounds, a linear, any text decoder, as ``transformers``
joins them in Qwen2-Audio.
"""

from dataclasses import dataclass
from typing import ClassVar

from loongplug.models.architecture import Encoding, MultimodalArchitecture, TextArchitecture
from loongplug.models.audio_transformer import Qwen2AudioEncoderConfig
from loongplug.models.family import ANY, WHOLE, Family, InTransformers
from loongplug.models.projectors import LinearConfig


@dataclass(frozen=True, kw_only=True)
class Qwen2AudioConfig(MultimodalArchitecture):
    """An encoder of sounds, a linear and a text decoder; which one, ``_target_`` says.

    Qwen2-Audio itself has an encoder of its own and Qwen2. A token id that is None is the
    tokenizer's; it is filled in before the model is built.
    """

    plain_positions: ClassVar[bool] = True
    keys: ClassVar[dict[str, str]] = {
        "audio_encoder": "audio_encoder",
        "audio_projector": "audio_projector",
        "text_decoder": "foundation",
    }
    encoders: ClassVar[dict[str, Encoding]] = {
        "audio_encoder": Encoding(projector="audio_projector", media=("audio",))
    }
    audio_encoder: Qwen2AudioEncoderConfig
    audio_projector: LinearConfig
    foundation: TextArchitecture
    audio_token_id: int | None = None


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
        special_tokens={"audio_token_id": "<|AUDIO|>"},
        marks={"audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>"},
    ),
)
