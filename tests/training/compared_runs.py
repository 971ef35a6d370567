"""Losses and gradient norms of whole runs on forked ranks, and how runs end that are stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def losses(flags: list[str], *more: str, ranks: int = 1) -> list[float]:
    """Of every step, the same on every rank."""
    return [loss for loss, _ in train(flags, *more, ranks=ranks)]


def exit_code(rank: int, *, flags: list[str]) -> int | str | None:
    """How a run ends that does not run to its end."""
    try:
        run(flags)
    except SystemExit as ended:
        return ended.code
    return "ran to the end"


def before(owner: type, method: str, act: Callable[[], None], *, at: int) -> None:
    """Have ``act`` called before the call number ``at`` of a method."""
    original, calls = getattr(owner, method), 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            act()
        return original(*args, **kwargs)

    setattr(owner, method, called)


def first_weights(flags: list[str], folder: Path) -> str:
    """A Hugging Face folder that runs can start from: drawn, and not trained."""
    train(flags, "--lr", "0", "--train-iters", "1", "--save-hf", str(folder))
    return str(folder)


def same(found: Steps, expected: Steps) -> bool:
    """To what fp32 sums in another order may differ by."""
    return len(found) == len(expected) and torch.allclose(
        torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0
    )
