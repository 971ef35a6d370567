"""Whole runs with packing: how full packs are, and where a run says so."""

import json

import pytest
from layout_flags import TP2_PP2
from ranks import run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from loongplug.training.progress import StepReport
from loongplug.training.run import run


def reports(rank: int, *, flags: list[str]) -> list[StepReport]:
    return run(flags)


def train(flags: list[str], *more: str, ranks: int = 1) -> list[StepReport]:
    return run_ranks(reports, ranks, flags=[*flags, *more], timeout=120.0)[0]


def test_packs_are_fuller_than_padded_rows_and_a_run_says_so(flags, tmp_path):
    packing = (
        *("--packing", "--seq-length", "160", "--micro-batch-size", "1", "--train-iters", "2"),
        *("--metrics-json", str(tmp_path / "metrics.json")),
        *("--tensorboard-dir", str(tmp_path / "tensorboard")),
    )
    steps = train(flags, *packing, *TP2_PP2, ranks=4)
    assert all(step.fill_rate > 0.9 for step in steps)
    padded = train(flags, "--train-iters", "2")
    assert all(step.fill_rate < 0.85 for step in padded)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    tokens = sum(step.tokens for step in steps)
    assert metrics["fill_rate"] == tokens / (2 * 8 * 160)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    written = [(event.step, event.value) for event in board.Scalars("fill rate")]
    assert written == [(i + 1, pytest.approx(step.fill_rate)) for i, step in enumerate(steps)]
