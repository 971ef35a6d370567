"""The benchmark beside TRL: both sides get the same rows and tokens."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from beside_ranks import trl_row
from beside_trl import SIZES, TRL, end_without_newline, in_order, loss_apart, measure
from modes.levels_work import write_levels_data
from transformers import AutoTokenizer

from loongplug.data.sample_order import SampleOrder


@pytest.mark.quick
def test_rows_come_as_the_run_takes_them() -> None:
    rows = [f"row {number}" for number in range(40)]
    taken = SampleOrder(len(rows), seed=1234).indices(range(len(rows)))
    assert in_order(rows) == [rows[at] for at in taken] != rows


@pytest.mark.quick
def test_trl_trains_on_the_answer_and_its_end(tmp_path: Path) -> None:
    write_levels_data(tmp_path, samples=1)
    end_without_newline(tmp_path / "processor" / "chat_template.jinja")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "processor")
    line = (tmp_path / "train.jsonl").read_text()
    row = trl_row(json.loads(line), folder=tmp_path)
    prompt = tokenizer.apply_chat_template(
        row["prompt"], tokenize=False, add_generation_prompt=True
    )
    whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
    # What TRL trains on is what comes behind the prompt; LoongPlug's answers end so.
    assert whole.removeprefix(prompt) == f"{len(row['images'])}<|im_end|>"
    assert all(Path(image).is_file() for image in row["images"])


@pytest.mark.sweep
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_all_sides_have_the_same_losses(tmp_path: Path) -> None:
    sides = (TRL, "DP2, uniform", "DP2, full separation")
    found = measure(
        tmp_path, replace(SIZES["small"], accumulation=1), sides=sides, rounds=1, steps=2
    )
    assert loss_apart(found) < 1e-4
