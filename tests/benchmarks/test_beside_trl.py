"""The benchmark beside TRL: its arithmetic, and that both sides get the same rows and tokens."""

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from beside_ranks import RankNotes, trl_row
from beside_trl import (
    SIZES,
    TRL,
    RunFigures,
    beside,
    end_without_newline,
    in_order,
    loss_apart,
    measure,
    table_of,
)
from modes.levels_work import write_levels_data
from rich.console import Console
from transformers import AutoTokenizer

from loongplug.data.sample_order import SampleOrder


@pytest.mark.quick
def test_figures_are_of_the_steps_after_the_first() -> None:
    first = RankNotes(
        ended=[110.0, 112.0, 115.0],
        processor=[7.0, 8.0, 9.5],
        losses=[3.0, 2.0, 1.0],
        tokens=[999, 100, 150],
        peak_bytes=30,
        held_bytes=20,
    )
    second = replace(first, processor=[7.0, 9.0, 10.0], peak_bytes=40, held_bytes=10)
    assert RunFigures.of_ranks([first, second], began=100.0) == RunFigures(
        tokens_per_second=50.0,
        startup_seconds=10.0,
        processor_seconds=2.75,
        peak_bytes=40,
        held_bytes=20,
        losses=(3.0, 2.0, 1.0),
    )


@pytest.mark.quick
def test_ratios_are_by_round_and_losses_are_those_of_every_run() -> None:
    theirs = [RunFigures(tokens_per_second=rate, startup_seconds=9.0) for rate in (100, 200)]
    ours = [
        replace(run, tokens_per_second=rate) for run, rate in zip(theirs, (150, 220), strict=True)
    ]
    assert beside(ours, theirs) == [1.5, 1.1]
    printed = io.StringIO()
    Console(width=200, file=printed).print(table_of("small", {TRL: theirs, "ours": ours}))
    assert "1.30 (1.10 to 1.50)" in printed.getvalue()
    theirs[0] = replace(theirs[0], losses=(2.0, 1.0))
    ours[1] = replace(ours[1], losses=(2.0, 1.25))
    assert loss_apart({TRL: theirs, "ours": ours}) == 0.25  # two of the runs know no losses


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
