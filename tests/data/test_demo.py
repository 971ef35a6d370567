"""The demo data: what is in them, that answers are right, and that test scans are unseen."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from loongplug.data.dataset import ChatDataset
from loongplug.data.demo import make_demo_data
from loongplug.data.demo_tasks import NUMBER_WORDS, TASKS
from loongplug.data.processor import load_processor

Row = dict[str, Any]

TRAIN, TEST = 600, 150


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make_demo_data(folder, train=TRAIN, test=TEST, seed=5)
    return folder


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def parts(row: Row, kind: str) -> list[str]:
    return [part[kind] for part in row["messages"][0]["content"] if part["type"] == kind]


def scan(image: str) -> tuple[int, int, int]:
    """Scan, height and width of an image by its name."""
    number, height, width = re.fullmatch(r"images/(\d+)-(\d+)x(\d+)\.png", image).groups()
    return int(number), int(height), int(width)


@pytest.mark.quick
def test_test_scans_are_in_no_training_sample(demo: Path) -> None:
    seen, held_out = (
        {scan(image)[0] for row in read(demo / name) for image in parts(row, "image")}
        for name in ("train.jsonl", "test.jsonl")
    )
    assert len(held_out) > 150
    assert len(seen) > 500
    assert not seen & held_out


@pytest.mark.quick
def test_answers_are_right(demo: Path) -> None:
    """Worked out again from the scans' own labels, question by question."""
    labels = load_digits().target
    asked = set()
    for row in read(demo / "train.jsonl") + read(demo / "test.jsonl"):
        (question,) = parts(row, "text")
        digits = [str(labels[scan(image)[0]]) for image in parts(row, "image")]
        question, _, text = question.partition(": ")
        words = text.split()
        expected = {
            "Read the digits.": "".join(digits),
            "Read the digits in reverse order.": "".join(reversed(digits)),
            "Which digit is the largest?": max(digits, default=""),
            "How many scans are there?": str(len(digits)),
            "Write as digits": "".join(
                str(NUMBER_WORDS.index(word)) for word in words if word in NUMBER_WORDS
            ),
        }[question]
        asked.add(row["task"])
        assert row["messages"][1] == {"role": "assistant", "content": expected}
    assert asked == {task.name for task in TASKS}
    assert sum(task.share for task in TASKS) == pytest.approx(1)


@pytest.mark.quick
def test_samples_are_varied(demo: Path) -> None:
    rows = read(demo / "train.jsonl")
    assert len(rows) == TRAIN
    assert len(read(demo / "test.jsonl")) == TEST
    counts = [len(parts(row, "image")) for row in rows]
    assert set(counts) == {0, 1, 2, 3, 4, 5, 6}
    assert 0.08 < counts.count(0) / TRAIN < 0.16
    sizes = [scan(image)[1:] for row in rows for image in parts(row, "image")]
    assert set(sizes) == {(32, 32), (64, 32), (32, 64), (64, 64)}
    assert 0.75 < sizes.count((32, 32)) / len(sizes) < 0.85


@pytest.mark.quick
def test_images_are_the_scans(demo: Path) -> None:
    scans = load_digits().images
    written = sorted((demo / "images").iterdir())
    used = {
        image
        for name in ("train.jsonl", "test.jsonl")
        for row in read(demo / name)
        for image in parts(row, "image")
    }
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


def test_same_seed_same_files(demo: Path, tmp_path: Path) -> None:
    make_demo_data(tmp_path / "same", train=TRAIN, test=TEST, seed=5)
    make_demo_data(tmp_path / "other", train=TRAIN, test=TEST, seed=6)
    for name in ("train.jsonl", "test.jsonl"):
        text = (demo / name).read_text()
        assert (tmp_path / "same" / name).read_text() == text
        assert (tmp_path / "other" / name).read_text() != text
    for name in ("train.jsonl", "images", "processor"):
        assert (tmp_path / "same" / name).exists()
    image = next((demo / "images").iterdir())
    assert (tmp_path / "same" / "images" / image.name).read_bytes() == image.read_bytes()


def test_every_sample_loads_within_the_demos_sequence_length(demo: Path) -> None:
    processor = load_processor(demo / "processor")
    for name in ("train.jsonl", "test.jsonl"):
        dataset = ChatDataset(demo / name, processor=processor, seq_length=48, training_phase="sft")
        for index in range(len(dataset)):
            sample = dataset[index]
            assert processor.tokenizer.unk_token_id not in sample.input_ids
            assert sample.loss_mask.sum() >= 2


@pytest.mark.quick
@pytest.mark.parametrize("name", ["train", "test"])
def test_no_samples_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"0 {name} samples asked for"):
        make_demo_data(tmp_path, **{name: 0})
