"""Architecture of Qwen2-Audio, module by module. YAML files fill these dataclasses."""

from dataclasses import dataclass
from typing import ClassVar

from loongplug.models.architecture import Encoding, MultimodalArchitecture, TextArchitecture
from loongplug.models.audio_transformer.config import Qwen2AudioEncoderConfig
from loongplug.models.projectors.config import LinearConfig


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
