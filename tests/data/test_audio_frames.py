"""Frames of sounds: those of transformers' extractor, and how many there are."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from audio_folders import AUDIO_CONFIG, MEL_BINS, OMNI_CONFIG, SECONDS, extractor, noise
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder,
    chunk_and_pad_features,
    get_audio_cu_seqlens,
    get_pool_indices,
)
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from loongplug.data.audio_frames import AudioFrames
from loongplug.data.media_sizes import AudioSizes

pytestmark = pytest.mark.quick

LONGEST = 100 * SECONDS
QWEN2_AUDIO = AudioSizes(mel_bins=MEL_BINS, longest=LONGEST, behind=2)
OMNI = AudioSizes(mel_bins=MEL_BINS, longest=30_000)
ALWAYS = AudioSizes(mel_bins=MEL_BINS, longest=LONGEST, always=True, pooled=False)
EXTRACTOR = extractor()


def sound(samples: int, *, seed: int = 0) -> np.ndarray:
    """Noise that fades, so that its loudest value is at its beginning."""
    return (noise(samples, seed=seed)[:, 0] * np.linspace(1, 0.01, samples)).astype(np.float32)


def theirs(*sounds: np.ndarray) -> Any:
    """What the processors of Qwen2-Audio and Qwen2.5-Omni make of them."""
    return EXTRACTOR(
        list(sounds),
        sampling_rate=16_000,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="pt",
    )


@given(samples=st.integers(321, 16_000 * SECONDS), kind=st.sampled_from([QWEN2_AUDIO, OMNI]))
@settings(max_examples=40)
def test_rows_are_the_extractors_frames_and_silence_behind(samples, kind):
    frames = AudioFrames(EXTRACTOR, kind)
    rows, grid = frames.frames(sound(samples))
    assert grid == frames.grid(samples) == (1, 1, -(-samples // 160) + kind.behind)
    assert rows.shape == (grid[2], MEL_BINS)
    assert rows.dtype == torch.float32
    expected = theirs(sound(samples))
    assert int(expected["attention_mask"].sum()) == kind.frames(grid)
    there = expected["input_features"][0].T[: grid[2]]
    torch.testing.assert_close(rows[: len(there)], there, rtol=0, atol=1e-6)
    assert not rows[LONGEST:].any()  # zeros, as a convolution has them
    # As the processors of both compute it of the mask.
    length = (kind.frames(grid) - 1) // 2 + 1
    assert frames.tokens(grid) == (length - 2) // 2 + 1


@pytest.mark.parametrize("kind", [QWEN2_AUDIO, OMNI, ALWAYS], ids=["qwen2", "omni", "always"])
def test_inputs_of_the_model_in_transformers(kind):
    sounds = [sound(n, seed=n) for n in (8_000, 16_000 * SECONDS, 400 if kind.always else 481)]
    frames = AudioFrames(EXTRACTOR, kind)
    rows, grids = zip(*map(frames.frames, sounds), strict=True)
    made = frames.model_inputs(torch.cat(rows), torch.tensor(grids))
    expected = theirs(*sounds)
    features, mask = made["input_features"], made["feature_attention_mask"]
    if kind is OMNI:  # it takes nothing beyond the mask
        expected["input_features"] = (
            expected["input_features"] * expected["attention_mask"][:, None]
        )
        features = features * mask[:, None]
    torch.testing.assert_close(features, expected["input_features"], rtol=0, atol=1e-6)
    if kind.always:
        assert mask.all()
    else:
        torch.testing.assert_close(mask, expected["attention_mask"])


def test_silence_and_one_loud_sample():
    """The loudest frame may be one behind the last, which hears the last sample best."""
    frames = AudioFrames(EXTRACTOR, QWEN2_AUDIO)
    silent = np.zeros(3_201, np.float32)
    click = silent.copy()
    click[-1] = 0.9
    for each in (silent, click):
        rows, grid = frames.frames(each)
        made = frames.model_inputs(rows, torch.tensor([grid]))["input_features"]
        torch.testing.assert_close(made, theirs(each)["input_features"], rtol=0, atol=1e-6)


def test_what_is_too_long_is_refused():
    for kind in (QWEN2_AUDIO, OMNI):  # of the latter, by the folder's extractor
        frames = AudioFrames(EXTRACTOR, kind)
        assert frames.most_samples == 16_000 * SECONDS
        frames.grid(frames.most_samples)
        with pytest.raises(ValueError, match="longer than the 2 seconds that the model takes"):
            frames.grid(frames.most_samples + 1)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("feature_size", 80),
        ("sampling_rate", 8_000),
        ("hop_length", 80),
        ("n_fft", 512),
        ("dither", 1e-4),
        ("padding_value", 0.5),
        ("padding_side", "left"),
    ],
)
def test_another_extractor_is_refused_by_its_setting(setting, value):
    with pytest.raises(ValueError, match=f"^{setting} {value!r}, where .* was expected: put in"):
        AudioFrames(extractor(**{setting: value}), QWEN2_AUDIO)


def test_where_sounds_are_filled_up_the_lengths_are_equal():
    with pytest.raises(ValueError, match="nb_max_frames 100, where 200 was expected"):
        AudioFrames(extractor(chunk_length=1), ALWAYS)


def test_sizes_of_a_models_config():
    assert AudioSizes.of_config({"audio_config": AUDIO_CONFIG}) == QWEN2_AUDIO
    assert AudioSizes.of_config(OMNI_CONFIG) == OMNI
    assert AudioSizes.of_config(OMNI_CONFIG["thinker_config"]) == OMNI
    published = AudioSizes.of_config({"audio_config": {"model_type": "qwen2_audio_encoder"}})
    assert published == dataclasses.replace(QWEN2_AUDIO, mel_bins=128, longest=3_000)
    assert AudioSizes.of_config({"vision_config": {}}) is None
    for change in ({"model_type": "whisper"}, {"num_mel_bins": 0}, {"max_source_positions": "9"}):
        with pytest.raises(ValueError, match="expected"):
            AudioSizes.of_config({"audio_config": AUDIO_CONFIG | change})


def their_lengths(frames: int, encoder: Any = Qwen2AudioEncoder) -> tuple[int, int]:
    """States and tokens of a sound."""
    states, tokens = encoder._get_feat_extract_output_lengths(
        SimpleNamespace(), torch.tensor([frames])
    )
    return states.item(), tokens.item()


@given(frames=st.integers(1, 30_000))
def test_states_and_tokens_are_those_of_transformers(frames):
    assert their_lengths(frames) == their_lengths(frames, Qwen2_5OmniAudioEncoder)
    assert their_lengths(frames) == (OMNI.states(frames), OMNI.tokens(frames))
    assert ALWAYS.tokens(frames) == their_lengths(frames)[0]


@given(
    frames=st.lists(st.integers(3, 900), min_size=1, max_size=4),
    half=st.integers(1, 150),
)
def test_chunks_of_whole_windows_make_as_many_states_as_their_sound(frames, half):
    lengths = torch.tensor(frames)
    _, chunks = chunk_and_pad_features(torch.zeros(1, sum(frames)), lengths, half)
    assert get_audio_cu_seqlens(chunks)[-1].item() == sum(map(OMNI.states, frames))
    assert len(get_pool_indices(lengths)) == sum(map(OMNI.tokens, frames))


@pytest.mark.parametrize("kind", [QWEN2_AUDIO, OMNI, ALWAYS], ids=["qwen2", "omni", "always"])
def test_the_shortest_sound_is_the_first_with_a_token(kind):
    if kind.always:
        assert kind.shortest == kind.longest
        return
    assert kind.tokens(kind.shortest) == 1
    assert kind.tokens(kind.shortest - 1) == 0
