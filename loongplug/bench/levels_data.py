"""Samples with images enough that encoding them is a large share of the work.

They look like the demo's: several images of various sizes, a short question, a short answer. What
is on the images does not matter to the clock.
"""

import json
import random
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from loongplug.data.demo_processor import write_processor

# Height, width. Multiples of 32, as the demo's processor takes them: one token per 32 x 32.
SIZES: Final = ((96, 96), (96, 128), (128, 96), (128, 128))
IMAGES_PER_SAMPLE: Final = (5, 6)

# The most that a sample takes: its images' tokens with two marks each, and its words.
_WORDS: Final = 24
SEQ_LENGTH: Final = max(IMAGES_PER_SAMPLE) * (max(h * w for h, w in SIZES) // 32**2 + 2) + _WORDS


def write_levels_data(folder: Path, *, samples: int, seed: int = 1234) -> None:
    """Write ``train.jsonl``, ``images/`` and ``processor/``; the same arguments, the same files."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    write_processor(folder / "processor")
    generator = np.random.default_rng(seed)
    for height, width in SIZES:
        noise = generator.integers(0, 256, size=(height, width), dtype=np.uint8)
        Image.fromarray(noise, mode="L").save(folder / _image(height, width))
    rng = random.Random(seed)
    rows = [json.dumps(_row(rng)) + "\n" for _ in range(samples)]
    (folder / "train.jsonl").write_text("".join(rows), encoding="utf-8")


def _row(rng: random.Random) -> dict[str, object]:
    sizes = [rng.choice(SIZES) for _ in range(rng.choice(IMAGES_PER_SAMPLE))]
    images = [{"type": "image", "image": _image(*size)} for size in sizes]
    question = {"type": "text", "text": "How many scans are there?"}
    return {
        "messages": [
            {"role": "user", "content": [*images, question]},
            {"role": "assistant", "content": str(len(images))},
        ]
    }


def _image(height: int, width: int) -> str:
    return f"images/{height}x{width}.png"
