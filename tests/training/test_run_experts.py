"""Whole training runs of a model with experts: layouts, bf16, resume in another layout."""

from unittest.mock import patch

import pytest
import torch
from compared_runs import exit_code, first_weights, losses
from ranks import run_ranks

from loongplug.models.layers import mlp
from loongplug.training.run import run

MODEL = ("--model-name", "qwen3_vl_moe_tiny", "--use-distributed-optimizer")
EP2 = ("--expert-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def train(flags: list[str], *more: str, ranks: int = 1) -> list[float]:
    return losses([*flags, *MODEL], *more, ranks=ranks)


@pytest.fixture(scope="module")
def single(flags, tmp_path_factory):
    """Weights and losses of the single-rank run that all layouts are held against."""
    weights = first_weights([*flags, *MODEL], tmp_path_factory.mktemp("weights") / "hf")
    return weights, train(flags, "--load-hf", weights)


def of_steps(rank: int, *, flags: list[str], at_once: bool) -> list[tuple[float, float | None]]:
    """Loss and norm of the gradients of every step."""
    joinable = mlp.joinable if at_once else lambda experts: False
    with patch.object(mlp, "joinable", joinable):
        return [(step.loss, step.grad_norm) for step in run(flags)]


def test_experts_at_once_are_experts_one_by_one(flags, single):
    """Weights arrive while experts compute: a product must not begin before its own are there."""
    weights, _ = single
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000")
    everything = [*flags, *MODEL, *overlap, "--load-hf", weights]
    at_once, one_by_one = (
        run_ranks(of_steps, 2, flags=everything, at_once=each, timeout=120.0)[0]
        for each in (True, False)
    )
    assert at_once == one_by_one
    assert len(set(at_once)) > 1


def test_a_checkpoint_goes_on_with_other_expert_parallelism(flags, single, tmp_path):
    weights, expected = single
    save = ("--save", str(tmp_path))
    resharded = ("--dist-ckpt-optim-fully-reshardable", "--ckpt-fully-parallel-save")
    stop = [*flags, *MODEL, *save, *resharded, "--load-hf", weights]
    codes = run_ranks(exit_code, 2, flags=[*stop, "--exit-interval", "2"], timeout=120.0)
    assert codes == [0, 0]
    after = (*TP2, *EP2, "--expert-tensor-parallel-size", "1")
    found = train(flags, *save, *resharded, "--load", str(tmp_path), *after, ranks=2)
    torch.testing.assert_close(found, expected[2:], rtol=2e-5, atol=0)
