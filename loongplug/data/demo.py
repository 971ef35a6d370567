"""Demo data: questions about scans of handwritten digits.

The scans are the 1,797 images of 8 x 8 pixels that scikit-learn brings along. They are split
before anything else: no scan of a test sample is in any training sample.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.progress import Progress

from loongplug.data.demo_processor import write_processor
from loongplug.data.demo_tasks import choose_task

TEST_SCANS = 297

_BRIGHTEST = 16  # the scans' grey levels are 0 to 16
_USUAL_SIZE = (32, 32)  # height, width: one visual token
_OTHER_SIZES = ((64, 32), (32, 64), (64, 64))
_USUAL_SHARE = 0.8
_MOST_OTHERS = 3  # per sample, which bounds its length


def make_demo_data(out: Path, *, train: int = 12000, test: int = 500, seed: int = 1234) -> None:
    """Write ``train.jsonl``, ``test.jsonl``, ``images/`` and ``processor/`` into ``out``.

    The same arguments give the same files. Shows progress on a terminal. Needs scikit-learn.
    """
    for name, number in (("train", train), ("test", test)):
        if number < 1:
            raise ValueError(f"{number} {name} samples asked for: expected at least 1.")
    scans, digits = _load_scans()
    order = list(range(len(scans)))
    random.Random(f"{seed} split").shuffle(order)
    splits = {
        "train": (order[TEST_SCANS:], train),
        "test": (order[:TEST_SCANS], test),
    }
    (out / "images").mkdir(parents=True, exist_ok=True)
    write_processor(out / "processor")
    written: set[str] = set()
    with Progress(transient=True) as progress:
        for name, (members, number) in splits.items():
            rng = random.Random(f"{seed} {name}")
            samples = (_sample(rng, scans=members, digits=digits) for _ in range(number))
            with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                for row, files in progress.track(samples, total=number, description=name):
                    file.write(json.dumps(row) + "\n")
                    for scan, size in files:
                        path = _image_name(scan, size)
                        if path not in written:
                            _write_scan(scans[scan], out / path, number=scan, size=size)
                            written.add(path)


def _sample(
    rng: random.Random, *, scans: Sequence[int], digits: Sequence[int]
) -> tuple[dict[str, Any], tuple[tuple[int, tuple[int, int]], ...]]:
    """A row about some of ``scans``, and the files it needs as (scan, (height, width)).

    ``digits`` says what every scan shows.
    """
    task = choose_task(rng)
    count = rng.choice(task.counts)
    shown = [rng.choice(scans) for _ in range(count)]
    values = [digits[scan] for scan in shown]
    question = {"type": "text", "text": task.question(values)}
    files = tuple(zip(shown, _sizes(rng, count), strict=True)) if task.with_scans else ()
    images = [{"type": "image", "image": _image_name(scan, size)} for scan, size in files]
    row = {
        "messages": [
            {"role": "user", "content": [*images, question]},
            {"role": "assistant", "content": task.answer(values)},
        ],
        "task": task.name,
    }
    return row, files


def _sizes(rng: random.Random, count: int) -> Iterator[tuple[int, int]]:
    others = 0
    for _ in range(count):
        if others < _MOST_OTHERS and rng.random() >= _USUAL_SHARE:
            others += 1
            yield rng.choice(_OTHER_SIZES)
        else:
            yield _USUAL_SIZE


def _load_scans() -> tuple[NDArray[np.float64], list[int]]:
    """The scans [1797, 8, 8] and the digit that each shows."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "The demo data come with scikit-learn, which is not installed: pip install"
            " 'loongplug[demo]'."
        ) from error
    data = load_digits()
    return data.images, data.target.tolist()


def _image_name(scan: int, size: tuple[int, int]) -> str:
    height, width = size
    return f"images/{scan:04d}-{height}x{width}.png"


def _write_scan(
    scan: NDArray[np.float64], path: Path, *, number: int, size: tuple[int, int]
) -> None:
    """A larger image is a larger sheet: the scan lies in one of its halves or quarters."""
    height, width = size
    scan_height, scan_width = _USUAL_SIZE
    rows, columns = height // scan_height, width // scan_width
    row, column = divmod(number % (rows * columns), columns)
    grey = np.round(scan * (255 / _BRIGHTEST)).astype(np.uint8)
    enlarged = Image.fromarray(grey).resize((scan_width, scan_height), Image.Resampling.BICUBIC)
    sheet = Image.new("L", (width, height))
    sheet.paste(enlarged, (column * scan_width, row * scan_height))
    sheet.save(path)
