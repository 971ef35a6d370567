"""Audio transformers over log-mel frames: Whisper's, Qwen2-Audio's and Qwen2.5-Omni's.

One encoder, which data drive; projectors and decoders are other parts'.
"""

from loongplug.models.audio_transformer.config import (
    OmniAudioConfig,
    Qwen2AudioEncoderConfig,
    WhisperAudioConfig,
)
from loongplug.models.parts import Part

_BUILD = "loongplug.models.audio_transformer.encoder:build_encoder"
_HUGGING_FACE = "loongplug.models.audio_transformer.hf:encoder"
_JSON = {
    "num_layers": "encoder_layers",
    "hidden_size": "d_model",
    "ffn_hidden_size": "encoder_ffn_dim",
    "num_attention_heads": "encoder_attention_heads",
    "mel_bins": "num_mel_bins",
    "max_positions": "max_source_positions",
    "activation": "activation_function",
}
_START = {"initializer_range": "initializer_range"}

LOONGPLUG_PARTS = (
    Part(
        name="whisper_audio",
        config_class=WhisperAudioConfig,
        build=_BUILD,
        hugging_face=_HUGGING_FACE,
        config_json=_JSON | {"initializer_range": "init_std"},
        model_type="whisper",
    ),
    Part(
        name="qwen2_audio",
        config_class=Qwen2AudioEncoderConfig,
        build=_BUILD,
        hugging_face=_HUGGING_FACE,
        config_json=_JSON | _START,
        model_type="qwen2_audio_encoder",
    ),
    Part(
        name="qwen2_5_omni_audio",
        config_class=OmniAudioConfig,
        build=_BUILD,
        hugging_face=_HUGGING_FACE,
        config_json=_JSON | _START | {"n_window": "n_window", "output_dim": "output_dim"},
        model_type="qwen2_5_omni_audio_encoder",
    ),
)
