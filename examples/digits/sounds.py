"""Demo data with sounds: questions about spoken digits, alone and beside scans.

Whom test samples hear is in no training sample, and the scans that they show are in none either.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from digits.make import check_demo_folder
from digits.scans import Picture, Scans, draw_sizes, load_scans, write_picture
from digits.speech import Utterance, speak
from digits.tasks import (
    AUDIO_TASKS,
    BOTH_TASKS,
    NUMBER_WORDS,
    SOUND_WORDS,
    SoundTask,
    choose_task,
)
from loongplug.verify.tiny_processor import write_processor

# Of eSpeak NG; a voice is an accent and a speaker.
ACCENTS = ("en", "en-029", "en-gb-scotland", "en-gb-x-rp", "en-us", "en-us-nyc")
TRAIN_SPEAKERS = (
    *("f1", "f2", "f3", "f4", "m1", "m2", "m3", "m4", "m5", "m6", "Alex", "Andrea", "Andy"),
    *("Annie", "adam", "aunty", "belinda", "benjamin", "edward", "grandpa", "linda", "norbert"),
    *("quincy", "rob", "zac"),
)
TEST_SPEAKERS = ("f5", "m7", "Alicia", "Michael", "robert")
RATES = (140, 220)  # words in a minute
PITCHES = (30, 70)  # of eSpeak NG, 0 to 99


@dataclass(frozen=True)
class _Sample:
    row: dict[str, Any]
    spoken: list[Utterance]
    shown: list[Picture]


@dataclass
class _Draw:
    """Samples of one file, at random."""

    rng: random.Random
    tasks: Sequence[SoundTask]
    name: str  # of the file, which begins the names of its sounds
    speakers: Sequence[str]
    scans: Sequence[int]
    digits: Sequence[int]  # that every scan shows
    sounds: int = field(default=0, init=False)  # so far

    def sample(self) -> _Sample:
        task = choose_task(self.rng, self.tasks)
        heard = [self._digits(task.spoken) for _ in range(task.sounds)]
        spoken = [self._utterance(digits) for digits in heard]
        shown = [self.rng.choice(self.scans) for _ in range(self.rng.choice(task.scans))]
        sizes = draw_sizes(self.rng, len(shown))
        pictures = [Picture(scan, size) for scan, size in zip(shown, sizes, strict=True)]
        media = [{"type": "audio", "audio": utterance.path} for utterance in spoken]
        images = [{"type": "image", "image": picture.path} for picture in pictures]
        first, second = self.rng.sample((media, images), 2)
        answer = task.answer(
            seen=[self.digits[scan] for scan in shown],
            heard=[digit for digits in heard for digit in digits],
        )
        content = [*first, *second, {"type": "text", "text": task.ask}]
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": answer},
        ]
        return _Sample({"messages": messages, "task": task.name}, spoken, pictures)

    def _digits(self, counts: Sequence[int]) -> list[int]:
        return [self.rng.randrange(10) for _ in range(self.rng.choice(counts))]

    def _utterance(self, digits: Sequence[int]) -> Utterance:
        path = f"sounds/{self.name}-{self.sounds:06d}.wav"
        self.sounds += 1
        return Utterance(
            text=", ".join(NUMBER_WORDS[digit] for digit in digits),
            voice=f"{self.rng.choice(ACCENTS)}+{self.rng.choice(self.speakers)}",
            rate=self.rng.randint(*RATES),
            pitch=self.rng.randint(*PITCHES),
            path=path,
        )


def make_sound_data(out: Path, *, train: int, test: int, seed: int = 1234) -> None:
    """Write rows about sounds, ``sounds/``, ``images/`` and processors into ``out``.

    ``train_audio.jsonl`` and ``test_audio.jsonl`` have sounds alone, ``train_both.jsonl`` and
    ``test_both.jsonl`` scans as well; ``train`` and ``test`` say how many rows each has.
    ``processor_qwen2_audio/`` and ``processor_qwen2_5_omni/`` are for models of these families.

    All may lie in one folder with what :func:`digits.make.make_demo_data` writes: with the
    same seed, no scan of a test sample is in any training sample. The same arguments give the same
    files. Shows progress on a terminal.

    Raises ValueError where a number is below 1, and where scikit-learn or the package with eSpeak
    NG is not installed.
    """
    for name, number in (("train samples", train), ("test samples", test)):
        if number < 1:
            raise ValueError(f"{number} {name} with sounds asked for: expected at least 1.")
    check_demo_folder(out)
    scans = load_scans(seed=seed)
    samples: dict[str, list[_Sample]] = {}
    for kind, tasks in (("audio", AUDIO_TASKS), ("both", BOTH_TASKS)):
        for split, members, speakers, number in (
            ("train", scans.train, TRAIN_SPEAKERS, train),
            ("test", scans.test, TEST_SPEAKERS, test),
        ):
            name = f"{split}_{kind}"
            rng = random.Random(f"{seed} {name}")
            draw = _Draw(rng, tasks, name, speakers, scans=members, digits=scans.digits)
            samples[name] = [draw.sample() for _ in range(number)]
    _write_media([sample for each in samples.values() for sample in each], out, scans=scans)
    for name, each in samples.items():
        lines = (json.dumps(sample.row) + "\n" for sample in each)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    words = {*SOUND_WORDS, "Audio"}  # which Qwen2-Audio's template says of each sound
    write_processor(out / "processor_qwen2_audio", "qwen2_audio", words=[*words])
    write_processor(out / "processor_qwen2_5_omni", "qwen2_5_omni", words=SOUND_WORDS)


def _write_media(samples: Sequence[_Sample], out: Path, *, scans: Scans) -> None:
    for folder in ("images", "sounds"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for picture in {picture for sample in samples for picture in sample.shown}:
        write_picture(picture, out, of=scans.images[picture.scan])
    spoken = [utterance for sample in samples for utterance in sample.spoken]
    with Progress(transient=True) as progress:
        for _ in progress.track(speak(spoken, out), total=len(spoken), description="sounds"):
            pass
