"""The demo data: what is in them, that answers are right, and that test scans are unseen.

Of both kinds of questions, in one folder.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits.make import make_demo_data
from digits.tasks import NEW_TASKS, NUMBER_WORDS, TASKS
from PIL import Image
from sklearn.datasets import load_digits

from loongplug.data.dataset import ChatDataset
from loongplug.data.processor_folder import load_processor

Row = dict[str, Any]

TRAIN, TEST = 600, 150
FILES = ("train.jsonl", "test.jsonl", "new_train.jsonl", "new_test.jsonl")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make_demo_data(folder, train=TRAIN, test=TEST, seed=5)
    make_demo_data(folder, train=TRAIN, test=TEST, seed=5, new_questions=True)
    return folder


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def parts(row: Row, kind: str) -> list[str]:
    return [part[kind] for part in row["messages"][0]["content"] if part["type"] == kind]


def scan(image: str) -> tuple[int, int, int]:
    """Scan, height and width of an image by its name, which may end with a variant."""
    name = re.fullmatch(r"images/(\d+)-(\d+)x(\d+)(-[1-9])?\.png", image)
    number, height, width = name.groups()[:3]
    return int(number), int(height), int(width)


@pytest.mark.quick
def test_test_scans_are_in_no_training_sample(demo: Path) -> None:
    seen, held_out = (
        {
            scan(image)[0]
            for name in (f"{split}.jsonl", f"new_{split}.jsonl")
            for row in read(demo / name)
            for image in parts(row, "image")
        }
        for split in ("train", "test")
    )
    assert len(held_out) > 150
    assert len(seen) > 500
    assert not seen & held_out


@pytest.mark.quick
def test_answers_are_right(demo: Path) -> None:
    """Worked out again from the scans' own labels, question by question."""
    labels = load_digits().target
    asked = set()
    for row in (row for name in FILES for row in read(demo / name)):
        (question,) = parts(row, "text")
        digits = [str(labels[scan(image)[0]]) for image in parts(row, "image")]
        question, _, text = question.partition(": ")
        words = text.split()
        expected = {
            "Read the digits.": "".join(digits),
            "Read the digits in reverse order.": "".join(reversed(digits)),
            "Which digit is the largest?": max(digits, default=""),
            "Which digit is the smallest?": min(digits, default=""),
            "How many scans are there?": str(len(digits)),
            "Write as digits": "".join(
                str(NUMBER_WORDS.index(word)) for word in words if word in NUMBER_WORDS
            ),
        }[question]
        asked.add(row["task"])
        assert row["messages"][1] == {"role": "assistant", "content": expected}
    assert asked == {task.name for task in (*TASKS, *NEW_TASKS)}
    for tasks in (TASKS, NEW_TASKS):
        assert sum(task.share for task in tasks) == pytest.approx(1)


@pytest.mark.quick
def test_rows_are_what_they_have_always_been(demo: Path) -> None:
    """Figures and losses in the documentation are of these rows."""
    rows = (demo / "train.jsonl").read_bytes() + (demo / "test.jsonl").read_bytes()
    assert hashlib.sha256(rows).hexdigest() == (
        "88ef6c1439a9100893f75d1ec28ed6cfebfa9a966e4e87b0051ffaf39dbdf024"
    )


@pytest.mark.quick
def test_images_are_the_scans(demo: Path) -> None:
    scans = load_digits().images
    written = sorted((demo / "images").iterdir())
    used = {image for name in FILES for row in read(demo / name) for image in parts(row, "image")}
    assert {f"images/{path.name}" for path in written} == used
    places = set()
    for path in written[::5]:
        number, height, width = scan(f"images/{path.name}")
        with Image.open(path) as image:
            assert image.size == (width, height)
            sheet = np.asarray(image, dtype=float)
        cells = {
            (top, left): sheet[top : top + 32, left : left + 32]
            for top in range(0, height, 32)
            for left in range(0, width, 32)
        }
        ((place, cell),) = ((place, cell) for place, cell in cells.items() if cell.any())
        small = cell.reshape(8, 4, 8, 4).mean(axis=(1, 3))  # back to 8 x 8
        assert np.corrcoef(small.ravel(), scans[number].ravel())[0, 1] > 0.97
        places.add((height, width, place))
    assert len(places) == 1 + 2 + 2 + 4  # the scan lies everywhere on the larger sheets


@pytest.mark.quick
def test_variants_are_of_training_scans_alone_and_differ_a_little(tmp_path: Path) -> None:
    make_demo_data(tmp_path, train=300, test=20, variants=3)
    assert all(
        image.count("-") == 1
        for row in read(tmp_path / "test.jsonl")
        for image in parts(row, "image")
    )
    names = {image for row in read(tmp_path / "train.jsonl") for image in parts(row, "image")}
    assert {name.count("-") == 2 and name[-5] for name in names} == {False, "1", "2"}
    plain = {name for name in names if f"{name[:-4]}-1.png" in names}
    assert len(plain) > 10
    for name in plain:
        variants = (tmp_path / each for each in (name, f"{name[:-4]}-1.png"))
        one, other = (np.asarray(Image.open(each), dtype=float).ravel() for each in variants)
        assert 0.4 < np.corrcoef(one, other)[0, 1] < 1


@pytest.mark.parametrize(("folder", "tokens"), [("processor", 48), ("processor_llava", 128)])
def test_every_sample_loads_with_all_of_its_characters(
    demo: Path, folder: str, tokens: int
) -> None:
    processor = load_processor(demo / folder)
    options = {"training_phase": "sft", "plain_positions": folder == "processor_llava"}
    for name in FILES:
        dataset = ChatDataset(demo / name, processor=processor, seq_length=tokens, **options)
        for index in range(len(dataset)):
            sample = dataset[index]
            assert processor.tokenizer.unk_token_id not in sample.input_ids
            assert sample.loss_mask.sum() >= 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "what"),
    [("train", "train samples"), ("test", "test samples"), ("variants", "variants")],
)
def test_none_of_them_is_refused(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"0 {what} asked for"):
        make_demo_data(tmp_path, **{name: 0})
