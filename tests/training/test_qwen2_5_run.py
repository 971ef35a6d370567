"""Whole training runs of the tiny Qwen2.5-VL."""

import pytest
import torch
from ranks import run_ranks
from transformers import AutoModelForImageTextToText

from loongplug.training.run import run

MODEL = ("--model-name", "qwen2_5_vl_tiny")


def losses(rank: int, *, flags: list[str]) -> list[float]:
    return [step.loss for step in run(flags)]


def train(flags: list[str], *more: str, ranks: int = 1) -> list[float]:
    return run_ranks(losses, ranks, flags=[*flags, *MODEL, *more], timeout=120.0)[0]


TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="module")
def single(flags, tmp_path_factory):
    """Weights and losses of the single-rank run that other layouts are held against."""
    weights = tmp_path_factory.mktemp("weights") / "hf"
    train(flags, "--lr", "0", "--train-iters", "1", "--save-hf", str(weights))
    return weights, train(flags, "--load-hf", str(weights))


def test_qwen2_5_trains_alike_in_another_layout_and_comes_back(flags, single, tmp_path):
    """And its checkpoint goes on in a third layout."""
    weights, expected = single
    assert len(expected) == 4
    assert expected[-1] < 0.9 * expected[0]  # it learns, so a wrong update shows
    save = (*("--save", str(tmp_path / "run")), "--use-distributed-optimizer")
    resharded = ("--dist-ckpt-optim-fully-reshardable", "--ckpt-fully-parallel-save")
    found = train(
        flags,
        *("--load-hf", str(weights), "--save-hf", str(tmp_path / "hf")),
        *(*TP2_PP2, "--sequence-parallel", *save, *resharded, "--save-interval", "2"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1", "model.image_encoder.recompute=true"),
        ranks=4,
    )
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)

    before, after = (
        AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        for folder in (weights, tmp_path / "hf")
    )
    assert [name for name in before if torch.equal(before[name], after[name])] == []

    from_two = ("--load", str(tmp_path / "run"), "--ckpt-step", "2")
    found = train(flags, *save, *resharded, *from_two, ranks=2)
    torch.testing.assert_close(found, expected[2:], rtol=2e-5, atol=0)
