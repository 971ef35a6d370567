"""The demo's sounds: what is said is what the answers say, by voices that tests alone have."""

import json
import re
import sys
import wave
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits import sounds as digit_sounds
from digits.scans import load_scans
from digits.sounds import make_sound_data
from digits.speech import Utterance, speak
from digits.tasks import AUDIO_TASKS, BOTH_TASKS, NUMBER_WORDS
from transformers import AutoTokenizer

from loongplug.data.media_sizes import SAMPLE_RATE
from loongplug.verify.tiny_processor import SECONDS, VOCAB_SIZE

Row = dict[str, Any]

TRAIN, TEST = 200, 40
FILES = ("train_audio.jsonl", "test_audio.jsonl", "train_both.jsonl", "test_both.jsonl")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounds")
    make_sound_data(folder, train=TRAIN, test=TEST, seed=5)
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Utterance]:
    """What was to be spoken, by its file; nothing is."""
    found: dict[str, Utterance] = {}

    def note(utterances: list[Utterance], folder: Path) -> Iterator[Utterance]:
        found.update({utterance.path: utterance for utterance in utterances})
        yield from utterances

    monkeypatch.setattr(digit_sounds, "speak", note)
    return found


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def parts(row: Row, kind: str) -> list[str]:
    return [part[kind] for part in row["messages"][0]["content"] if part["type"] == kind]


def scans_of(row: Row) -> list[int]:
    return [int(re.fullmatch(r"images/(\d+)-.*", path)[1]) for path in parts(row, "image")]


def samples_of(path: Path) -> np.ndarray:
    """[samples], from -1 to 1."""
    with wave.open(str(path), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16_000)
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2") / 32768


def test_what_is_asked_for_is_what_the_answers_say(
    tmp_path: Path, asked: dict[str, Utterance]
) -> None:
    make_sound_data(tmp_path, train=TRAIN, test=TEST, seed=6)
    digits = load_scans(seed=6).digits
    used, tasks = [], Counter()
    for row in (row for name in FILES for row in read(tmp_path / name)):
        words = [word for path in parts(row, "audio") for word in asked[path].text.split(", ")]
        heard = " ".join(str(NUMBER_WORDS.index(word)) for word in words)
        seen = " ".join(str(digits[scan]) for scan in scans_of(row))
        expected = f"{seen}, {heard}" if seen else heard
        assert row["messages"][1] == {"role": "assistant", "content": expected}
        used += parts(row, "audio")
        tasks[row["task"], len(parts(row, "audio")), bool(seen)] += 1
    assert sorted(used) == sorted(asked)  # each sound is of one row
    assert set(tasks) == {("hear", 1, False), ("hear_two", 2, False), ("see_and_hear", 1, True)}
    assert tasks["hear", 1, False] > 2 * tasks["hear_two", 2, False] > 0
    for each in (AUDIO_TASKS, BOTH_TASKS):
        assert sum(task.share for task in each) == pytest.approx(1)


def test_speakers_and_scans_of_tests_are_in_no_training_sample(
    tmp_path: Path, asked: dict[str, Utterance]
) -> None:
    make_sound_data(tmp_path, train=TRAIN, test=TEST, seed=6)
    speakers: dict[str, set[str]] = {"train": set(), "test": set()}
    for path, utterance in asked.items():
        split = re.match(r"sounds/(train|test)_", path)[1]
        speakers[split].add(utterance.voice.split("+")[1])
    assert len(speakers["train"]) > 20
    assert len(speakers["test"]) == 5
    assert not speakers["train"] & speakers["test"]
    scans = load_scans(seed=6)
    for split, members in (("train", scans.train), ("test", scans.test)):
        shown = {scan for row in read(tmp_path / f"{split}_both.jsonl") for scan in scans_of(row)}
        assert shown
        assert shown <= set(members)


def test_files_are_as_models_hear_them(demo: Path) -> None:
    seconds: dict[int, list[float]] = {}
    used = set()
    for row in (row for name in FILES for row in read(demo / name)):
        for path in parts(row, "audio"):
            samples = samples_of(demo / path)
            assert 0.45 < np.abs(samples).max() <= 0.5
            assert 0.15 < len(samples) / SAMPLE_RATE < SECONDS
            used.add(path)
            if len(parts(row, "audio")) == 1:
                count = len(row["messages"][1]["content"].split(", ")[-1].split())
                seconds.setdefault(count, []).append(len(samples) / SAMPLE_RATE)
    assert {f"sounds/{path.name}" for path in (demo / "sounds").iterdir()} == used
    means = [np.mean(seconds[count]) for count in (1, 2, 3, 4)]
    assert np.diff(means).min() > 0.2
    images = {
        path for name in FILES[2:] for row in read(demo / name) for path in parts(row, "image")
    }
    assert {f"images/{path.name}" for path in (demo / "images").iterdir()} == images


def test_same_seed_same_files(tmp_path: Path) -> None:
    for folder, seed in (("one", 5), ("same", 5), ("other", 6)):
        make_sound_data(tmp_path / folder, train=4, test=1, seed=seed)
    one, same = (
        {
            str(path.relative_to(tmp_path / folder)): path.read_bytes()
            for path in (tmp_path / folder).rglob("*")
            if path.is_file()
        }
        for folder in ("one", "same")
    )
    assert one == same
    sounds = [name for name in one if name.startswith("sounds")]
    assert len(sounds) >= 10
    assert len({one[name] for name in sounds}) == len(sounds)
    for name in ("train_audio.jsonl", "sounds/train_audio-000000.wav"):
        assert (tmp_path / "other" / name).read_bytes() != one[name]


@pytest.mark.parametrize(("kind", "folder"), [("audio", "qwen2_audio"), ("both", "qwen2_5_omni")])
def test_every_word_is_in_the_vocabulary_of_the_demos_models(
    demo: Path, kind: str, folder: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo / f"processor_{folder}")
    assert max(tokenizer.get_vocab().values()) < VOCAB_SIZE
    orders = set()
    for row in read(demo / f"test_{kind}.jsonl"):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        answer = row["messages"][1]["content"]
        assert tokenizer.decode(ids).endswith(f"assistant\n{answer}<|im_end|>\n")
        assert text.count("<|audio_bos|><|AUDIO|><|audio_eos|>") == len(parts(row, "audio"))
        for said in parts(row, "text"):
            assert len(tokenizer.tokenize(said)) <= len(re.findall(r"\w+|[?,]", said))
        orders.add(text.find("<|IMAGE|>") < text.index("<|AUDIO|>"))
    assert orders == ({True} if kind == "audio" else {False, True})


@pytest.mark.quick
@pytest.mark.parametrize(("train", "test"), [(0, 1), (1, 0)])
def test_none_of_them_is_refused(tmp_path: Path, train: int, test: int) -> None:
    with pytest.raises(ValueError, match=r"0 (train|test) samples with sounds asked for"):
        make_sound_data(tmp_path, train=train, test=test)


@pytest.mark.quick
def test_without_the_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(ValueError, match=r"pip install 'loongplug\[demo-audio\]'"):
        next(speak([], tmp_path))


def test_a_voice_that_is_none_is_an_error(tmp_path: Path) -> None:
    """And no sound by another voice."""
    nobody = Utterance(text="one", voice="nobody", rate=175, pitch=50, path="one.wav")
    with pytest.raises(RuntimeError, match="ended with 1"):
        list(speak([nobody], tmp_path))
    assert not list(tmp_path.iterdir())
