"""Whole training runs of the tiny Qwen2.5-VL."""

import pytest
import torch
from ranks import run_ranks
from transformers import AutoModelForImageTextToText

from loongplug.training.run import run


def losses(rank: int, *, flags: list[str]) -> list[float]:
    return [step.loss for step in run(flags)]


def train(flags: list[str], *more: str, ranks: int = 1) -> list[float]:
    model = ("--model-name", "qwen2_5_vl_tiny")
    return run_ranks(losses, ranks, flags=[*flags, *model, *more], timeout=120.0)[0]


@pytest.mark.slow
def test_qwen2_5_trains_alike_in_another_layout_and_comes_back(flags, tmp_path):
    weights, trained = tmp_path / "weights", tmp_path / "trained"
    train(flags, "--lr", "0", "--train-iters", "1", "--save-hf", str(weights))
    expected = train(flags, "--load-hf", str(weights))
    assert len(expected) == 4
    assert expected[-1] < 0.9 * expected[0]  # it learns, so a wrong update shows
    found = train(
        flags,
        *("--load-hf", str(weights), "--save-hf", str(trained)),
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
        *("--sequence-parallel", "--use-distributed-optimizer"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1", "model.image_encoder.recompute=true"),
        ranks=4,
    )
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)

    before, after = (AutoModelForImageTextToText.from_pretrained(f) for f in (weights, trained))
    still = [
        name
        for name, tensor in before.state_dict().items()
        if torch.equal(tensor, after.state_dict()[name])
    ]
    assert still == []
