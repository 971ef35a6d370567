"""Losses and gradient norms of whole runs on forked ranks."""

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from ranks import run_ranks

from loongplug.training.run import run

Steps = list[tuple[float, float]]


def steps(rank: int, *, flags: list[str]) -> Steps:
    """Loss and gradient norm of every step."""
    norms: list[float] = []
    step = ChainedOptimizer.step

    def noted(self):
        result = step(self)
        norms.append(result[1])
        return result

    ChainedOptimizer.step = noted
    losses = [step.loss for step in run(flags)]
    return list(zip(losses, norms, strict=True))


def train(flags: list[str], *more: str, ranks: int = 1, function=steps, **options) -> Steps:
    """The same on every rank. ``function`` stands in for :func:`steps` with a fault built in."""
    found, *others = run_ranks(function, ranks, flags=[*flags, *more], timeout=180.0, **options)
    assert others == [found] * (ranks - 1)
    return found


def same(found: Steps, expected: Steps) -> bool:
    """To what fp32 sums in another order may differ by."""
    return len(found) == len(expected) and torch.allclose(
        torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0
    )
