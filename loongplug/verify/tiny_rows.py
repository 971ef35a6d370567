"""Tiny rows of noise and short texts, for every medium that a model takes; always the same."""

import json
import random
import string
import wave
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from loongplug.data.media_sizes import SAMPLE_RATE

# With it, microbatches next to each other have media of the same sizes: only what is compared can
# tell them apart.
_SEED = 246
_COUNTS = (1, 2, 2, 3, 3, 6)  # of images in a row; of at most three beside sounds
_SMALL = (32, 32)  # height, width: of one token
_LARGE = ((64, 32), (32, 64), (64, 64))  # of two or four
_SECONDS = (0.3, 0.8, 1.6)  # of all sounds of a row
_QUESTIONS = ("Sum?", "Max?", "Add", "So")


def write_rows(folder: Path, *, samples: int, media: Collection[str] = ("image",)) -> Path:
    """Write ``train.jsonl`` and its files of ``media`` (images, sounds) into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "train.jsonl"
    lines = [json.dumps(_row(folder, number, media)) + "\n" for number in range(samples)]
    rows.write_text("".join(lines), encoding="utf-8")
    return rows


def _row(folder: Path, number: int, media: Collection[str]) -> dict[str, Any]:
    """One turn; or two, if the row has few media. One row in eight is text alone."""
    rng = random.Random(f"{_SEED} {number}")
    shown = []
    if rng.random() >= 1 / 8:
        if "image" in media:
            count = min(rng.choice(_COUNTS), 3 if "audio" in media else 6)
            first = rng.choice((*_LARGE, *[_SMALL] * len(_LARGE)))
            sizes = [first, *[_SMALL] * (count - 1)]
            shown += [_image(folder, f"{number}-{n}", size, rng) for n, size in enumerate(sizes)]
        if "audio" in media:
            count = rng.randint(1, 2)
            seconds = rng.choice(_SECONDS) / count
            shown += [_sound(folder, f"{number}-{n}", seconds, rng) for n in range(count)]
    rng.shuffle(shown)
    turns = rng.randint(1, 2) if len(shown) <= 2 else 1
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        question = {"type": "text", "text": rng.choice(_QUESTIONS)}
        answer = "".join(rng.choices(string.digits, k=rng.randint(1, 6 // turns)))
        messages += [
            {"role": "user", "content": [*shown[turn::turns], question]},
            {"role": "assistant", "content": answer},
        ]
    return {"messages": messages}


def _image(folder: Path, name: str, size: tuple[int, int], rng: random.Random) -> dict[str, str]:
    height, width = size
    pixels = np.frombuffer(rng.randbytes(height * width * 3), dtype=np.uint8)
    (folder / "images").mkdir(exist_ok=True)
    Image.fromarray(pixels.reshape(height, width, 3)).save(folder / f"images/{name}.png")
    return {"type": "image", "image": f"images/{name}.png"}


def _sound(folder: Path, name: str, seconds: float, rng: random.Random) -> dict[str, str]:
    """A tone with noise, neither of which another sound has."""
    count = round(seconds * SAMPLE_RATE)
    noise = np.frombuffer(rng.randbytes(count), dtype=np.int8)
    tone = np.sin(np.arange(count) * rng.uniform(0.05, 1.0))
    (folder / "sounds").mkdir(exist_ok=True)
    write_sound(folder / f"sounds/{name}.wav", (8_000 * tone + 20 * noise).astype(np.int16))
    return {"type": "audio", "audio": f"sounds/{name}.wav"}


def write_sound(path: Path, samples: NDArray[np.int16]) -> None:
    """Write a WAV file of one channel."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(samples.itemsize)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.astype("<i2").tobytes())
