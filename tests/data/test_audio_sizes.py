"""Lengths of sounds against those of transformers' feature extractor and encoders."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder,
    chunk_and_pad_features,
    get_audio_cu_seqlens,
    get_pool_indices,
)
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from loongplug.data.audio_sizes import HOP, SAMPLE_RATE, AudioSizes

pytestmark = pytest.mark.quick

WHISPER = AudioSizes(mel_bins=80, longest=3000, behind=2, always=True, pooled=False)
QWEN2_AUDIO = AudioSizes(mel_bins=128, longest=3000, behind=2)
OMNI = AudioSizes(mel_bins=128, longest=30_000)
KINDS = {"whisper": WHISPER, "qwen2_audio": QWEN2_AUDIO, "omni": OMNI}
each_kind = pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)


def theirs(frames: int, encoder: Any = Qwen2AudioEncoder) -> tuple[int, int]:
    """States and tokens of a sound."""
    states, tokens = encoder._get_feat_extract_output_lengths(
        SimpleNamespace(), torch.tensor([frames])
    )
    return states.item(), tokens.item()


@given(frames=st.integers(1, 30_000))
def test_states_and_tokens_are_those_of_transformers(frames: int) -> None:
    assert theirs(frames) == theirs(frames, Qwen2_5OmniAudioEncoder)
    assert theirs(frames) == (OMNI.states(frames), OMNI.tokens(frames))
    assert WHISPER.tokens(frames) == theirs(frames)[0]


@given(
    frames=st.lists(st.integers(3, 900), min_size=1, max_size=4),
    half=st.integers(1, 150),
)
def test_chunks_of_whole_windows_make_as_many_states_as_their_sound(
    frames: list[int], half: int
) -> None:
    lengths = torch.tensor(frames)
    _, chunks = chunk_and_pad_features(torch.zeros(1, sum(frames)), lengths, half)
    assert get_audio_cu_seqlens(chunks)[-1].item() == sum(map(OMNI.states, frames))
    assert len(get_pool_indices(lengths)) == sum(map(OMNI.tokens, frames))


@pytest.mark.parametrize(
    "samples", [1, HOP - 1, HOP, HOP + 1, 3 * HOP, 16_000, 16_001, 29 * SAMPLE_RATE + 7]
)
def test_frames_are_those_that_the_feature_extractor_marks(samples: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=8)
    made = extractor(
        np.zeros(samples, dtype=np.float32),
        sampling_rate=SAMPLE_RATE,
        return_attention_mask=True,
    )
    marked = int(made["attention_mask"].sum())
    assert made["input_features"].shape[-1] == WHISPER.longest
    assert QWEN2_AUDIO.frames_of(samples) == OMNI.frames_of(samples) == marked
    assert WHISPER.frames_of(samples) == WHISPER.longest


@each_kind
@given(frames=st.integers(1, 3000))
def test_a_grid_gives_the_frames_back(sizes: AudioSizes, frames: int) -> None:
    assert sizes.grid(frames) == (1, 1, frames + sizes.behind)
    assert sizes.frames(sizes.grid(frames)) == frames


@each_kind
def test_the_shortest_sound_is_the_first_with_a_token(sizes: AudioSizes) -> None:
    if sizes.always:
        assert sizes.shortest == sizes.longest
        return
    assert sizes.tokens(sizes.shortest) == 1
    assert sizes.tokens(sizes.shortest - 1) == 0


@pytest.mark.parametrize(
    ("sizes", "states", "tokens"),
    [(WHISPER, 1500, 1500), (QWEN2_AUDIO, 1500, 750), (OMNI, 1500, 750)],
)
def test_published_numbers(sizes: AudioSizes, states: int, tokens: int) -> None:
    assert sizes.frames_of(30 * SAMPLE_RATE) == 3000
    assert (sizes.states(3000), sizes.tokens(3000)) == (states, tokens)
