"""Demo data: questions about scans of handwritten digits.

The scans are the 1,797 images of 8 x 8 pixels that scikit-learn brings along. They are split
before anything else: no scan of a test sample is in any training sample.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.progress import Progress

from loongplug.data.demo_processor import FixedImages, write_processor
from loongplug.data.demo_tasks import NEW_TASKS, TASKS, Task, choose_task

TEST_SCANS = 297

_BRIGHTEST = 16  # the scans' grey levels are 0 to 16
_USUAL_SIZE = (32, 32)  # height, width: one visual token
_OTHER_SIZES = ((64, 32), (32, 64), (64, 64))
_USUAL_SHARE = 0.8
_MOST_OTHERS = 3  # per sample, which bounds its length
_MOST_TURN = 10  # degrees, either way
_MOST_SHIFT = 2  # pixels of the usual size, each way


@dataclass(frozen=True)
class _Picture:
    """A scan on a sheet; variant 0 is the scan as it is, others are turned and moved a little."""

    scan: int
    size: tuple[int, int]  # height, width
    variant: int

    @property
    def path(self) -> str:
        height, width = self.size
        variant = f"-{self.variant}" if self.variant else ""
        return f"images/{self.scan:04d}-{height}x{width}{variant}.png"


def make_demo_data(
    out: Path,
    *,
    train: int = 12000,
    test: int = 500,
    seed: int = 1234,
    variants: int = 1,
    new_questions: bool = False,
) -> None:
    """Write ``train.jsonl``, ``test.jsonl``, ``images/`` and ``processor/`` into ``out``.

    Of each scan, training samples show ``variants``: the scan as it is, and turned and moved a
    little. Test samples show it as it is.

    With ``new_questions``, what the samples ask is another kind, in ``new_train.jsonl`` and
    ``new_test.jsonl``. Both kinds may lie in one folder: with the same seed, the scans of either's
    test samples are in no training sample of the other.

    The same arguments give the same files. Shows progress on a terminal. Needs scikit-learn.
    """
    tasks, prefix = (NEW_TASKS, "new_") if new_questions else (TASKS, "")
    for name, number in (
        ("train samples", train),
        ("test samples", test),
        ("variants", variants),
    ):
        if number < 1:
            raise ValueError(f"{number} {name} asked for: expected at least 1.")
    scans, digits = _load_scans()
    order = list(range(len(scans)))
    random.Random(f"{seed} split").shuffle(order)
    splits = {
        f"{prefix}train": (order[TEST_SCANS:], train, variants),
        f"{prefix}test": (order[:TEST_SCANS], test, 1),
    }
    (out / "images").mkdir(parents=True, exist_ok=True)
    write_processor(out / "processor")
    write_processor(out / "processor_llava", fixed=FixedImages())
    write_processor(out / "processor_internvl", fixed=FixedImages(merge=2))
    written: set[_Picture] = set()
    with Progress(transient=True) as progress:
        for name, (members, number, each) in splits.items():
            rng = random.Random(f"{seed} {name}")
            samples = (
                _sample(rng, tasks, scans=members, digits=digits, variants=each)
                for _ in range(number)
            )
            with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                for row, pictures in progress.track(samples, total=number, description=name):
                    file.write(json.dumps(row) + "\n")
                    for picture in pictures:
                        if picture not in written:
                            _write_picture(picture, out / picture.path, of=scans[picture.scan])
                            written.add(picture)


def _sample(
    rng: random.Random,
    tasks: Sequence[Task],
    *,
    scans: Sequence[int],
    digits: Sequence[int],
    variants: int,
) -> tuple[dict[str, Any], list[_Picture]]:
    """A row of one of ``tasks`` about some of ``scans``, and the pictures that it shows.

    ``digits`` says what every scan shows.
    """
    task = choose_task(rng, tasks)
    count = rng.choice(task.counts)
    shown = [rng.choice(scans) for _ in range(count)]
    values = [digits[scan] for scan in shown]
    question = {"type": "text", "text": task.question(values)}
    pictures = []
    if task.with_scans:
        sized = list(zip(shown, _sizes(rng, count), strict=True))
        pictures = [_Picture(scan, size, _variant(rng, variants)) for scan, size in sized]
    images = [{"type": "image", "image": picture.path} for picture in pictures]
    row = {
        "messages": [
            {"role": "user", "content": [*images, question]},
            {"role": "assistant", "content": task.answer(values)},
        ],
        "task": task.name,
    }
    return row, pictures


def _variant(rng: random.Random, variants: int) -> int:
    """Without variants nothing is drawn: such data stay what they have always been."""
    return rng.randrange(variants) if variants > 1 else 0


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


def _write_picture(picture: _Picture, path: Path, *, of: NDArray[np.float64]) -> None:
    """A larger image is a larger sheet: the scan ``of`` [8, 8] lies in a half or quarter of it."""
    height, width = picture.size
    scan_height, scan_width = _USUAL_SIZE
    rows, columns = height // scan_height, width // scan_width
    row, column = divmod(picture.scan % (rows * columns), columns)
    grey = np.round(of * (255 / _BRIGHTEST)).astype(np.uint8)
    enlarged = Image.fromarray(grey).resize((scan_width, scan_height), Image.Resampling.BICUBIC)
    if picture.variant:
        rng = random.Random(f"{picture.scan} {picture.variant}")
        enlarged = enlarged.rotate(
            rng.uniform(-_MOST_TURN, _MOST_TURN),
            Image.Resampling.BILINEAR,
            translate=(_shift(rng), _shift(rng)),
        )
    sheet = Image.new("L", (width, height))
    sheet.paste(enlarged, (column * scan_width, row * scan_height))
    sheet.save(path)


def _shift(rng: random.Random) -> int:
    return rng.randint(-_MOST_SHIFT, _MOST_SHIFT)
