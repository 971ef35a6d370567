"""Architecture of Qwen2.5-Omni's thinker, module by module. YAML files fill these dataclasses."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from loongplug.models.architecture import Encoding, MultimodalArchitecture
from loongplug.models.audio_transformer.config import OmniAudioConfig
from loongplug.models.projectors.config import LinearConfig
from loongplug.models.qwen2_5_vl.config import (
    Qwen25DecoderConfig,
    Qwen25ProjectorConfig,
    Qwen25VisionConfig,
)

if TYPE_CHECKING:
    from loongplug.data.video import VideoStyle


@dataclass(frozen=True, kw_only=True)
class OmniVisionConfig(Qwen25VisionConfig):
    """Qwen2.5-VL's ViT; its files have queries, keys and values apart."""

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
