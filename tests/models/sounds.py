"""Tiny audio towers of every kind, ours and transformers', with sounds for both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from lone_parts import part_of
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from loongplug.data.microbatch import MediaInput
from loongplug.models.audio_transformer import (
    AudioTransformerConfig,
    OmniAudioConfig,
    Qwen2AudioEncoderConfig,
    WhisperAudioConfig,
)
from loongplug.models.family import HuggingFacePart
from loongplug.models.hf_mapping import Mapping
from loongplug.models.parts import load

NAME = "audio_encoder"
SILENCE = -0.7  # what a log-mel of silence could be; not what convolutions pad with
AUDIO_TOKEN = 5
_SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,  # heads of 6: no multiple of 4
    "ffn_hidden_size": 40,
    "num_attention_heads": 4,
    "mel_bins": 7,
    "initializer_range": 0.2,
}


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A kind: its config, the tower's root in a whole model, and lengths that try it."""

    config_class: type[AudioTransformerConfig]
    theirs: str  # transformers' config class
    root: str
    options: dict[str, Any]
    sounds: tuple[int, ...]

    def config(self, **options: Any) -> AudioTransformerConfig:
        """Small."""
        return self.config_class(**(_SIZES | self.options | options))


TOWERS = {
    "whisper": Tower(
        config_class=WhisperAudioConfig,
        theirs="WhisperConfig",
        root="encoder",
        options={"max_positions": 9},
        sounds=(18, 18),
    ),
    "qwen2_audio": Tower(
        config_class=Qwen2AudioEncoderConfig,
        theirs="Qwen2AudioEncoderConfig",
        root="audio_tower",
        options={"max_positions": 11},
        # Odd and even, with an odd number of states and without, full and all but full.
        sounds=(7, 3, 22, 12, 21, 14, 20, 5),
    ),
    "omni": Tower(
        config_class=OmniAudioConfig,
        theirs="Qwen2_5OmniAudioEncoderConfig",
        root="audio_tower",
        options={"max_positions": 8, "n_window": 3, "output_dim": 10, "longest": 50},
        # Shorter than a chunk of 6, whole chunks, and one to five frames more.
        sounds=(5, 6, 7, 12, 13, 3, 14, 15, 22, 17),
    ),
}


def tower_of(config: AudioTransformerConfig) -> Tower:
    return next(each for each in TOWERS.values() if each.config_class is type(config))


def described(config: AudioTransformerConfig) -> HuggingFacePart:
    root = tower_of(config).root
    return load(part_of(config).hugging_face)(config, ours=NAME, theirs=root)


def mapping_of(config: AudioTransformerConfig) -> Mapping:
    return Mapping(described(config).rows, twins={})


def their_config(config: AudioTransformerConfig, **more: Any) -> Any:
    """The same in transformers, as an export would say it."""
    values = dict(described(config).values)
    for name, key in part_of(config).config_json.items():
        values[key] = getattr(config, name)
    return getattr(transformers, tower_of(config).theirs)(**values, **more)


def their_model(config: AudioTransformerConfig, *, seed: int = 0) -> Any:
    """transformers' encoder, for Qwen2-Audio the model that masks for it, with random weights.

    Nothing is left at 0 or 1, where mistakes hide.
    """
    torch.manual_seed(seed)
    theirs = their_config(config)
    if isinstance(config, WhisperAudioConfig):
        model = WhisperEncoder(theirs)
    elif isinstance(config, OmniAudioConfig):
        model = Qwen2_5OmniAudioEncoder(theirs)
    else:
        text = transformers.Qwen2Config(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=AUDIO_TOKEN + 1,
        )
        whole = transformers.Qwen2AudioConfig(
            audio_config=theirs, text_config=text, audio_token_index=AUDIO_TOKEN
        )
        model = transformers.models.qwen2_audio.modeling_qwen2_audio.Qwen2AudioModel(whole)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float()


def encoder_within(model: Any) -> Any:
    return getattr(model, "audio_tower", model)


def frames_of(config: AudioTransformerConfig, number: int, length: int) -> torch.Tensor:
    """Sound ``number`` of so many frames, [length, mel bins], the same at every call."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(length, config.mel_bins, generator=generator)


def window(config: AudioTransformerConfig, frames: torch.Tensor) -> torch.Tensor:
    """The sound as a feature extractor fills it up, [longest, mel bins]."""
    rest = config.sizes.longest - len(frames)
    return torch.cat([frames, torch.full((rest, config.mel_bins), SILENCE)])


def unit(config: AudioTransformerConfig, sounds: Sequence[int]) -> MediaInput:
    """All sounds of these lengths."""
    sizes = config.sizes
    rows = []
    for number, frames in enumerate(sounds):
        filled = window(config, frames_of(config, number, frames))
        filled = torch.cat([filled, torch.zeros(sizes.behind, config.mel_bins)])
        rows.append(filled[: frames + sizes.behind])
    grids = [sizes.grid(frames) for frames in sounds]
    return MediaInput(loaded=torch.cat(rows), grids=torch.tensor(grids))


def their_features(config: AudioTransformerConfig, model: Any, sounds: Sequence[int]) -> Any:
    """What a projector behind the tower is given of all sounds, [tokens, hidden]."""
    frames = [frames_of(config, number, length) for number, length in enumerate(sounds)]
    if isinstance(config, OmniAudioConfig):
        caught = []
        model.ln_post.register_forward_hook(lambda _, given, made: caught.append(made))
        model(torch.cat(frames).T, feature_lens=torch.tensor(sounds))
        return caught[0]
    windows = torch.stack([window(config, each).T for each in frames])
    if isinstance(config, WhisperAudioConfig):
        return model(windows).last_hidden_state.flatten(0, 1)
    caught = []
    model.multi_modal_projector.register_forward_pre_hook(lambda _, given: caught.append(given[0]))
    tokens = [config.tokens(config.sizes.grid(each)) for each in sounds]
    model(
        input_ids=torch.full((1, sum(tokens)), AUDIO_TOKEN),
        input_features=windows,
        feature_attention_mask=torch.arange(config.sizes.longest) < torch.tensor(sounds)[:, None],
    )
    (states,) = caught
    return torch.cat([each[:count] for each, count in zip(states, tokens, strict=True)])
