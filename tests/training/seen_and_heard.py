"""Rows of a model that sees and hears, with media of which only who loads them sees the damage."""

import json
import struct
from pathlib import Path

import numpy as np
from cut_images import cut
from PIL import Image

from loongplug.verify.tiny_processor import write_processor

ROWS = 8
IMAGE, SOUND = 1, 2  # rows that have an image, or a sound, alone


def flags_of(folder: Path, *, damaged: bool = False) -> list[str]:
    """Of two steps of four samples, which are all rows once.

    With ``damaged``, the image of row ``IMAGE`` and the sound of row ``SOUND`` are. Everything lies
    in ``folder``, which is not there yet.
    """
    folder.mkdir()
    write_processor(folder / "processor", "qwen2_5_omni")
    rows = [_row(folder, number) for number in range(ROWS)]
    if damaged:
        rows[IMAGE] = cut(rows[IMAGE], source=folder, folder=folder)
        _write_sound(folder / f"{SOUND}.wav", np.full(4_000, np.nan))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return [
        *("--model-name", "qwen2_5_omni_tiny", "--training-phase", "sft", "--device", "cpu"),
        *("--tokenizer-model", str(folder / "processor"), "--seq-length", "64"),
        *("--train-data-path", str(folder / "rows.jsonl"), "--train-iters", "2"),
        *("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-3"),
        *("--lr-decay-style", "constant", "--log-interval", "1", "--eval-iters", "0"),
    ]


def _row(folder: Path, number: int) -> str:
    """Of four rows, one has an image and a sound, two one of them, and one nothing."""
    content = []
    if number % 4 in (0, IMAGE):
        pixels = np.random.RandomState(number).randint(256, size=(32, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        content.append({"type": "image", "image": f"{number}.png"})
    if number % 4 in (0, SOUND):
        _write_sound(folder / f"{number}.wav", np.random.RandomState(number).uniform(-1, 1, 4_000))
        content.append({"type": "audio", "audio": f"{number}.wav"})
    content.append({"type": "text", "text": "?"})
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": f"{number} {number}"},
    ]
    return json.dumps({"messages": messages})


def _write_sound(file: Path, samples: np.ndarray) -> None:
    """A WAV file of floating point numbers, 16,000 a second."""
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, 16_000, 64_000, 4, 32)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    file.write_bytes(struct.pack("<4sI", b"RIFF", len(body)) + body)
