"""The Qwen2.5-Omni family: its thinker, which sees and hears, without the part that speaks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from loongplug.models.architecture import Encoding, MultimodalArchitecture
from loongplug.models.audio_transformer import OmniAudioConfig
from loongplug.models.family import Family, InTransformers
from loongplug.models.parts import VISION_JSON, Part
from loongplug.models.projectors import LinearConfig
from loongplug.models.qwen2_5_vl import (
    Qwen25DecoderConfig,
    Qwen25ProjectorConfig,
    Qwen25VisionConfig,
)

if TYPE_CHECKING:
    from loongplug.data.video import VideoStyle


@dataclass(frozen=True, kw_only=True)
class OmniVisionConfig(Qwen25VisionConfig):
    """Qwen2.5-VL's ViT; its files have queries, keys and values apart."""

    qkv: ClassVar[tuple[str, ...]] = ("attn.q", "attn.k", "attn.v")
    tokens_per_second: int = 25


@dataclass(frozen=True, kw_only=True)
class Qwen25OmniConfig(MultimodalArchitecture):
    """The thinker of Qwen2.5-Omni: encoders of images and sounds, and the decoder of Qwen2.5-VL.

    A token id that is None is the tokenizer's; it is filled in before the model is built.
    """

    keys: ClassVar[dict[str, str]] = {
        "image_encoder": "image_encoder",
        "image_projector": "image_projector",
        "audio_encoder": "audio_encoder",
        "audio_projector": "audio_projector",
        "text_decoder": "foundation",
    }
    encoders: ClassVar[dict[str, Encoding]] = {
        "image_encoder": Encoding(projector="image_projector", media=("image", "video")),
        "audio_encoder": Encoding(projector="audio_projector", media=("audio",)),
    }
    image_encoder: OmniVisionConfig
    image_projector: Qwen25ProjectorConfig
    audio_encoder: OmniAudioConfig
    audio_projector: LinearConfig
    foundation: Qwen25DecoderConfig
    image_token_id: int | None = None
    video_token_id: int | None = None
    audio_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    audio_start_token_id: int | None = None
    audio_end_token_id: int | None = None

    def video_style(self) -> "VideoStyle":
        """A video is one block of tokens, whose time axis counts seconds as sounds do."""
        from loongplug.data.video import VideoStyle

        return VideoStyle(
            timestamps=False,
            tokens_per_second=self.image_encoder.tokens_per_second,
            as_sounds=True,
        )


LOONGPLUG_PARTS = (
    Part(
        name="qwen2_5_omni_vit",
        config_class=OmniVisionConfig,
        build="loongplug.models.qwen2_5_vl.vision:build_encoder",
        hugging_face="loongplug.models.qwen2_5_vl:encoder",
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
        special_tokens={
            "image_token_id": "<|IMAGE|>",
            "video_token_id": "<|VIDEO|>",
            "audio_token_id": "<|AUDIO|>",
            "vision_start_token_id": "<|vision_bos|>",
            "vision_end_token_id": "<|vision_eos|>",
            "audio_start_token_id": "<|audio_bos|>",
            "audio_end_token_id": "<|audio_eos|>",
        },
    ),
)
