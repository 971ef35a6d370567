"""The data benchmark: what it counts, prints and writes, and that headers are all it reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from micro.data import run
from pace import times_slower
from PIL import Image, ImageFile

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _no_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded an image")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)


def measured(demo: Path, **options: Any) -> Any:
    defaults = {
        "files": [str(demo / "train.jsonl")],
        "tokenizer_model": demo / "processor",
        "training_phase": "sft",
        "samples": 40,
        "rounds": 3,
    }
    return run(**defaults | options)


def test_it_counts_and_says_so(demo, tmp_path, capsys):
    path = tmp_path / "data.json"
    figures = measured(demo, json_path=path)
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in (demo / "train.jsonl").read_text().splitlines()[:40]]
    parts = [part for row in rows for part in row["messages"][0]["content"]]
    assert figures.samples == 40
    assert figures.media == sum(part["type"] == "image" for part in parts)
    assert len(figures.processor_seconds) == len(figures.wall_seconds) == 3
    images = [demo / part["image"] for part in parts if part["type"] == "image"]

    def plainly() -> None:
        for image in images:
            assert Image.open(image).size

    slower = times_slower(lambda: measured(demo, rounds=1), plainly, turns=3)
    assert slower < 30  # measured: 8 to 10
    assert f"{figures.per_processor_second:,.0f}" in printed
    assert f"{figures.per_second:,.0f}" in printed
    written = json.loads(path.read_text())
    assert written["samples_per_processor_second"] == figures.per_processor_second
    assert written["samples_per_second"] == 40 / sorted(figures.wall_seconds)[1]


def test_a_row_that_cannot_be_used_ends_it(demo, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: "):
        measured(demo, files=[str(tmp_path / "bad.jsonl")])
    with pytest.raises(ValueError, match="--tokenizer-model is missing"):
        measured(demo, tokenizer_model=None)
