"""Demo data: questions about scans of handwritten digits.

The scans are the 1,797 images of 8 x 8 pixels that scikit-learn brings along. They are split
before anything else: no scan of a test sample is in any training sample.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from digits.scans import Picture, draw_sizes, load_scans, write_picture
from digits.tasks import (
    AUDIO_TASKS,
    BOTH_TASKS,
    NEW_TASKS,
    TASKS,
    WORDS,
    Task,
    choose_task,
)
from loongplug.output_files import check_output, json_lines, keys
from loongplug.verify.tiny_processor import write_processor

# A user's own rows may have these keys, too.
_NAMES = [task.name for task in (*TASKS, *NEW_TASKS, *AUDIO_TASKS, *BOTH_TASKS)]
_ROWS = json_lines(lambda row: keys("messages task")(row) and row["task"] in _NAMES)


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
    check_demo_folder(out)
    scans = load_scans(seed=seed)
    splits = {
        f"{prefix}train": (scans.train, train, variants),
        f"{prefix}test": (scans.test, test, 1),
    }
    (out / "images").mkdir(parents=True, exist_ok=True)
    write_processor(out / "processor", words=WORDS)
    write_processor(out / "processor_llava", "llava", words=WORDS)
    write_processor(out / "processor_internvl", "internvl", words=WORDS)
    written: set[Picture] = set()
    with Progress(transient=True) as progress:
        for name, (members, number, each) in splits.items():
            rng = random.Random(f"{seed} {name}")
            samples = (
                _sample(rng, tasks, scans=members, digits=scans.digits, variants=each)
                for _ in range(number)
            )
            with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                for row, pictures in progress.track(samples, total=number, description=name):
                    file.write(json.dumps(row) + "\n")
                    for picture in pictures:
                        if picture not in written:
                            write_picture(picture, out, of=scans.images[picture.scan])
                            written.add(picture)


def check_demo_folder(out: Path) -> None:
    """ValueError where other files than a demo's would be lost; a demo's folder has its rows."""
    rows = [path for name in ("train", "test", "new_") for path in out.glob(f"{name}*.jsonl")]
    for path in rows:
        check_output(path, _ROWS)
    others = [*out.glob("images"), *out.glob("sounds"), *out.glob("processor*")]
    if others and not rows:
        raise ValueError(f"{others[0]} is no demo's and would be lost: give another folder.")


def _sample(
    rng: random.Random,
    tasks: Sequence[Task],
    *,
    scans: Sequence[int],
    digits: Sequence[int],
    variants: int,
) -> tuple[dict[str, Any], list[Picture]]:
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
        sized = list(zip(shown, draw_sizes(rng, count), strict=True))
        pictures = [Picture(scan, size, _variant(rng, variants)) for scan, size in sized]
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
