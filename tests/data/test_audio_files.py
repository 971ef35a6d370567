"""Sound files: how long they are by their headers, and their samples."""

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audio_folders import noise, write_wav
from hypothesis import given, settings
from hypothesis import strategies as st

from loongplug.data.audio_files import audio_length, decode_audio, samples_at_16k
from loongplug.data.conversation import AudioClip

av = pytest.importorskip("av", reason="sounds need PyAV: pip install 'loongplug[video]'")

WHERE = "rows.jsonl:4"
ENOUGH = 10**7

pytestmark = pytest.mark.quick


def heard(path: Any, *, enough: int = ENOUGH) -> np.ndarray:
    """What is decoded, as long as was said before."""
    clip = AudioClip(path, audio_length(path, where=WHERE, enough=enough))
    sound = decode_audio(clip, where=WHERE)
    assert sound.dtype == np.float32
    assert sound.shape == (clip.samples,)
    return sound


def encode(path: Path, sound: np.ndarray, *, codec: str, rate: int, format: str) -> Path:
    """Write [samples, channels] with a codec."""
    layout = {1: "mono", 2: "stereo"}[sound.shape[1]]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        values = sound.astype(np.float32).T
        if format.startswith("s"):
            values = np.round(sound.T * 2**15).astype(np.int16)
        if not format.endswith("p"):
            values = values.T.reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(values), format, layout)
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_numbers_of_each_width_are_the_mean_of_the_channels(tmp_path, width, channels):
    path = tmp_path / "a.wav"
    written = write_wav(path, noise(70_000, channels=channels), width=width)
    # Apart in float32 alone.
    np.testing.assert_allclose(heard(path), written.mean(axis=1), rtol=0, atol=1e-7)
    assert np.abs(written).max() > 0.4


def test_a_tone_of_another_rate_is_the_same_tone(tmp_path):
    path = tmp_path / "a.wav"
    for rate in (8_000, 11_025, 44_100, 48_000):
        seconds = np.arange(rate) / rate
        tone = 0.5 * np.sin(2 * np.pi * 440 * seconds)
        write_wav(path, tone[:, None], rate=rate)
        expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
        # Not at the ends, where filters hear silence before and behind.
        np.testing.assert_allclose(heard(path)[200:-200], expected[200:-200], atol=1e-3)


@given(
    samples=st.integers(0, 3_000),
    rate=st.sampled_from([1_000, 8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 192_000]),
    channels=st.integers(1, 3),
)
@settings(max_examples=40)
def test_the_header_knows_how_much_is_heard(tmp_path_factory, samples, rate, channels):
    path = tmp_path_factory.mktemp("sounds") / "a.wav"
    write_wav(path, noise(samples, channels=channels), rate=rate)
    assert len(heard(path)) == -(-samples * 16_000 // rate)
    assert samples_at_16k(samples, rate=16_000) == samples


def test_a_wav_file_is_not_decoded_to_know_its_length(tmp_path, monkeypatch):
    write_wav(tmp_path / "a.wav", noise(1_000))
    monkeypatch.setitem(sys.modules, "av", None)
    assert audio_length(tmp_path / "a.wav", where=WHERE, enough=0) == 1_000


def test_flac_is_the_same_as_wav(tmp_path):
    sound = noise(20_001, channels=2)
    write_wav(tmp_path / "a.wav", sound)
    encode(tmp_path / "a.flac", sound, codec="flac", rate=16_000, format="s16")
    np.testing.assert_array_equal(heard(tmp_path / "a.flac"), heard(tmp_path / "a.wav"))


@pytest.mark.parametrize(
    ("name", "codec", "rate", "format"),
    [
        ("a.mp3", "libmp3lame", 44_100, "fltp"),
        ("a.ogg", "libopus", 48_000, "s16"),
        ("a.m4a", "aac", 16_000, "fltp"),
        ("float.wav", "pcm_f32le", 16_000, "flt"),
    ],
)
def test_lengths_of_others_are_those_that_are_decoded(tmp_path, name, codec, rate, format):
    tone = 0.5 * np.sin(2 * np.pi * 300 * np.arange(rate) / rate)[:, None]
    path = encode(tmp_path / name, tone, codec=codec, rate=rate, format=format)
    sound = heard(path)
    assert abs(len(sound) - 16_000) < 2_000  # codecs may add silence
    assert 0.4 < np.abs(sound[4_000:-4_000]).max() < 0.6
    # What is too long anyway is not decoded to its end.
    assert 100 < audio_length(path, where=WHERE, enough=100) < 8_000 or name == "float.wav"


def float_wav(path: Path, numbers: np.ndarray) -> Path:
    data = numbers.astype("<f4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, 16_000, 64_000, 4, 32)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    path.write_bytes(struct.pack("<4sI", b"RIFF", len(body)) + body)
    return path


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
def test_what_is_no_sound_pressure_is_refused(tmp_path, value):
    numbers = noise(2_000)[:, 0]
    np.testing.assert_allclose(heard(float_wav(tmp_path / "a.wav", numbers)), numbers, atol=1e-7)
    numbers[7] = value
    with pytest.raises(ValueError, match=r"rows.jsonl:4: audio .*a.wav has samples that are no"):
        heard(float_wav(tmp_path / "a.wav", numbers))


def missing(path: Path) -> None:
    """No file."""


def cut_off(path: Path) -> None:
    write_wav(path, noise(2_000))
    path.write_bytes(path.read_bytes()[:-10])


def text(path: Path) -> None:
    path.write_text("la la la")


def damaged(path: Path) -> None:
    path.write_bytes(b"RIFF\xff\xff\xff\xffWAVE" + bytes(range(256)) * 4)


def long_chunk(path: Path) -> None:
    path.write_bytes(b"RIFF" + struct.pack("<I", 20) + b"WAVELIST" + struct.pack("<I", 4_000))


def pipe(path: Path) -> None:
    import os

    os.mkfifo(path)


def slow(path: Path) -> None:
    write_wav(path, noise(20), rate=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (missing, "no audio file at"),
        (cut_off, "is cut off: its header says 4000 bytes of sound, but 3990"),
        (text, "damaged or no audio of a kind that is read"),
        (damaged, "damaged or no audio of a kind that is read"),
        (long_chunk, "damaged or no audio of a kind that is read"),
        (pipe, "cannot be opened: it is not a plain file"),
        (slow, "has 16 bits and 1 samples a second: expected up to 32 bits, and 1000 to"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, make, words):
    make(tmp_path / "a.wav")
    with pytest.raises(ValueError, match=f"^{WHERE}: .*{words}") as caught:
        audio_length(tmp_path / "a.wav", where=WHERE, enough=ENOUGH)
    assert "\n" not in str(caught.value)


def test_a_video_without_sound_has_none(tmp_path, write_video):
    with pytest.raises(ValueError, match="it has no audio stream"):
        audio_length(tmp_path / write_video("a.mp4", 1), where=WHERE, enough=ENOUGH)


@pytest.mark.parametrize("others", [999, 1_001])
def test_a_file_of_another_length_is_not_what_the_text_says(tmp_path, others):
    sound = noise(others)
    write_wav(tmp_path / "a.wav", sound)
    encode(tmp_path / "a.flac", sound, codec="flac", rate=16_000, format="s16")
    for name in ("a.wav", "a.flac"):
        with pytest.raises(ValueError, match=r"has not the 1000 samples .* do not change"):
            decode_audio(AudioClip(tmp_path / name, 1_000), where=WHERE)


def test_without_av_one_sentence_says_what_helps(tmp_path, monkeypatch):
    write_wav(tmp_path / "slow.wav", noise(1_000), rate=8_000)
    float_wav(tmp_path / "float.wav", noise(1_000)[:, 0])
    (tmp_path / "a.mp3").write_bytes(bytes(1_000))
    monkeypatch.setitem(sys.modules, "av", None)
    for name in ("slow.wav", "float.wav", "a.mp3"):
        with pytest.raises(ValueError, match=f"^{WHERE}: .*{name} is read by PyAV.*loongplug.vid"):
            audio_length(tmp_path / name, where=WHERE, enough=ENOUGH)
