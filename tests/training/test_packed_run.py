"""Whole training runs with packing against padded ones on the same samples."""

import json
from pathlib import Path

import pytest
import torch
from compared_runs import first_weights
from layout_flags import TP2_PP2
from ranks import run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from loongplug.training.progress import StepReport
from loongplug.training.run import run


def reports(rank: int, *, flags: list[str]) -> list[StepReport]:
    return run(flags)


def train(flags: list[str], *more: str, ranks: int = 1) -> list[StepReport]:
    return run_ranks(reports, ranks, flags=[*flags, *more], timeout=120.0)[0]


def losses(steps: list[StepReport]) -> list[float]:
    return [step.loss for step in steps]


# The look-ahead makes each pack of two samples that follow each other, so that four packs hold
# the eight samples of the padded run's global batch.
PAIRS = (
    *("--packing", "--packing-look-ahead", "2", "--seq-length", "160"),
    *("--micro-batch-size", "1", "--global-batch-size", "4"),
)
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")


@pytest.fixture(scope="module")
def padded(request, flags, demo, tmp_path_factory):
    """A model's flags, its weights, and the padded run's steps and validation loss."""
    flags = [*flags, "--model-name", request.param]
    folder = tmp_path_factory.mktemp("weights")
    few = demo / "three.jsonl"  # beside its images
    few.write_text("".join((demo / "test.jsonl").open().readlines()[:3]))
    flags += ["--load-hf", first_weights(flags, folder / "hf"), "--valid-data-path", str(few)]
    return flags, *validated(flags, folder=folder)


def validated(
    flags: list[str], *more: str, folder: Path, ranks: int = 1
) -> tuple[list[StepReport], float]:
    """A run's steps, and the loss of the validation data behind the last."""
    metrics = folder / "metrics.json"
    steps = train(flags, *more, "--metrics-json", str(metrics), ranks=ranks)
    return steps, json.loads(metrics.read_text())["valid_loss"]


# Gradients are compared in every family and layout by models/test_packed_step.py; here each family
# and each layout is met once by a whole run.
@pytest.mark.parametrize(
    ("padded", "layout", "ranks"),
    [
        ("qwen2_5_vl_tiny", (*TP2_PP2, "--sequence-parallel", *SELECTIVE), 4),
        ("qwen3_vl_moe_tiny", (*TP2_PP2, "--sequence-parallel", *SELECTIVE), 4),
    ],
    ids=["windows", "experts"],
    indirect=["padded"],
)
def test_a_packed_run_trains_as_the_padded_run_on_the_same_samples(padded, tmp_path, layout, ranks):
    """And evaluates the same rows, though their last step has blank packs, and its blank rows."""
    flags, expected, loss = padded
    found, packed_loss = validated(flags, *PAIRS, *layout, folder=tmp_path, ranks=ranks)
    assert packed_loss == pytest.approx(loss, rel=2e-5)
    assert len(found) == 4
    torch.testing.assert_close(losses(found), losses(expected), rtol=2e-5, atol=0)
    assert [step.tokens for step in found] == [step.tokens for step in expected]
    assert [step.capacity for step in found] == [4 * 160] * 4
    assert losses(expected)[-1] < 0.95 * losses(expected)[0]


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
