"""Whole runs whose padded rows are no longer than needed, against rows of ``--seq-length``."""

from typing import Any

import pytest
import torch
from layout_flags import VIRTUAL
from ranks import run_ranks

from loongplug.training import rank_data
from loongplug.training import run as training_run
from loongplug.training.progress import StepReport


def reports(rank: int, *, flags: list[str], whole: bool) -> list[StepReport]:
    """``whole``: rows of ``--seq-length``, as there were before."""
    before = rank_data.row_lengths_of, training_run.row_lengths_of
    if whole:
        rank_data.row_lengths_of = training_run.row_lengths_of = lambda args: None
    try:
        return training_run.run(flags)
    finally:
        rank_data.row_lengths_of, training_run.row_lengths_of = before


TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
BALANCED = ("--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.01")
CASES: dict[str, Any] = {
    "experts-pp2-vpp2": ("qwen3_vl_moe_tiny", (*VIRTUAL, *BALANCED), 2),
    "experts-ep2-dp2": ("qwen3_vl_moe_tiny", ("--expert-model-parallel-size", "2", *BALANCED), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_shorter_rows_train_alike(flags, case):
    model, layout, ranks = CASES[case]
    # Longer than any sample, and with a validation between the steps.
    more = ("--model-name", model, "--seq-length", "160", "--train-iters", "3", *layout)
    short, long = (
        run_ranks(reports, ranks, flags=[*flags, *more], whole=whole, timeout=120.0)[0]
        for whole in (False, True)
    )
    torch.testing.assert_close(
        [step.loss for step in short], [step.loss for step in long], rtol=2e-5, atol=0
    )
    assert [step.tokens for step in short] == [step.tokens for step in long]
    assert all(step.capacity == 8 * 160 for step in long)
    assert all(
        step.capacity < 0.7 * other.capacity for step, other in zip(short, long, strict=True)
    )
