"""A model learns spoken digits by its ears: trained on some voices, asked in others."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from digits.sounds import ACCENTS, PITCHES, RATES, TEST_SPEAKERS, TRAIN_SPEAKERS
from digits.speech import Utterance, speak
from digits.tasks import NUMBER_WORDS, SOUND_WORDS

from loongplug.verify.tiny_processor import write_processor

TRAINED, ASKED = 800, 100


def write_rows(folder: Path, name: str, *, speakers: tuple[str, ...], count: int) -> Path:
    """One digit a row, said by anyone of ``speakers``."""
    rng = random.Random(name)
    (folder / "sounds").mkdir(exist_ok=True)
    spoken, lines = [], []
    for number in range(count):
        digit = rng.randrange(10)
        path = f"sounds/{name}-{number}.wav"
        spoken.append(
            Utterance(
                text=NUMBER_WORDS[digit],
                voice=f"{rng.choice(ACCENTS)}+{rng.choice(speakers)}",
                rate=rng.randint(*RATES),
                pitch=rng.randint(*PITCHES),
                path=path,
            )
        )
        asked = [{"type": "audio", "audio": path}, {"type": "text", "text": "Which digit?"}]
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": str(digit)},
        ]
        lines.append(json.dumps({"messages": messages}))
    assert sum(1 for _ in speak(spoken, folder)) == count
    rows = folder / f"{name}.jsonl"
    rows.write_text("\n".join(lines))
    return rows


def loongplug(*words: object) -> None:
    command = [sys.executable, "-m", "loongplug", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.sweep  # that a run learns, the quickstart shows
def test_digits_of_voices_that_were_never_heard_are_understood(tmp_path: Path) -> None:
    write_processor(tmp_path / "processor", "qwen2_audio", words=[*SOUND_WORDS, "Audio"])
    train = write_rows(tmp_path, "train", speakers=TRAIN_SPEAKERS, count=TRAINED)
    asked = write_rows(tmp_path, "test", speakers=TEST_SPEAKERS, count=ASKED)
    loongplug(
        *("train", "--ranks", 1, "--device", "cpu", "--model-name", "qwen2_audio_tiny"),
        *("--tokenizer-model", tmp_path / "processor", "--train-data-path", train),
        *("--training-phase", "sft", "--seq-length", 48, "--train-iters", 100),
        *("--micro-batch-size", 16, "--global-batch-size", 32, "--adam-beta2", 0.95),
        *("--lr", 2e-3, "--min-lr", 2e-5, "--lr-decay-style", "cosine", "--lr-warmup-iters", 20),
        *("--weight-decay", 0.01, "--clip-grad", 1.0, "--log-interval", 20, "--eval-iters", 0),
        *("--save-hf", tmp_path / "hf"),
    )
    score = tmp_path / "score.json"
    loongplug("eval", "--model", tmp_path / "hf", "--data", asked, "--json", score)
    found = json.loads(score.read_text())
    print(found)
    assert found["eval_samples"] == ASKED
    assert found["exact_match"] >= 0.8  # one in ten by chance
