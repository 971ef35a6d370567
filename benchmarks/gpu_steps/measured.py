"""Runs of the larger models within a step: their flags, and rows of their figures."""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gpu_steps.bench import Bench
from gpu_steps.data import Data, grid_of
from gpu_steps.models import amounts_of
from gpu_steps.plain_run import PlainFigures, PlainSettings, plain_run
from gpu_steps.rows import Figure
from gpu_steps.sizes import ModelRun
from gpu_steps.timing import GIB
from gpu_steps.training_run import RunFigures, RunSettings, middle, training_run

PACKED = ("--packing",)


class FlopsPerToken:
    """Of an average token before padding, over samples of all sizes of images.

    Counted beside the first run, in a process of its own, since that imports much.
    """

    def __init__(self, bench: Bench, run: ModelRun, data: Data) -> None:
        self._child = bench.start(_flops_per_token, run=run, data=data)

    @cached_property
    def value(self) -> float:
        """Waits for it."""
        return self._child.result()


def _flops_per_token(*, run: ModelRun, data: Data) -> float:
    amounts, tokens = amounts_of(run), data.tokens_of_first(len(run.sides))
    flops = amounts.of_samples(tokens, {"image_encoder": list(map(grid_of, run.sides))})
    return float(flops / sum(tokens))


def trained(
    bench: Bench,
    case: str,
    run: ModelRun,
    data: Data,
    *,
    seq_length: int,
    micro_batch: int = 1,
    flags: Sequence[str] = (),
    **options: Any,
) -> RunFigures | None:
    """A training run by its flags; None, and a row that says why, where it failed.

    ``options`` are those of :class:`RunSettings`.
    """
    return bench.attempt(
        case,
        training_run,
        settings=RunSettings(
            flags=(
                *bench.run_flags(run, data, seq_length=seq_length),
                *("--micro-batch-size", str(micro_batch)),
                *flags,
            ),
            warmup=bench.sizes.warmup,
            steps=bench.sizes.steps,
            began=time.time(),
            folder=bench.folder,
            **options,
        ),
    )


def plain(
    bench: Bench, case: str, run: ModelRun, data: Data, *, updates: bool, **settings: Any
) -> PlainFigures | None:
    """The same model and samples with transformers and torch alone."""
    return bench.attempt(
        case,
        plain_run,
        run=run,
        settings=PlainSettings(
            updates=updates, warmup=bench.sizes.warmup, steps=bench.sizes.steps, **settings
        ),
        data=data,
        device=bench.device,
        began=time.time(),
        folder=bench.folder,
    )


def add_figures(
    bench: Bench, case: str, figures: RunFigures | PlainFigures, *, flops: FlopsPerToken
) -> None:
    """One row: rates by the whole step, and of forward and backward alone."""
    forward_backward = middle(figures.forward_backward_ms)
    optimizer = middle(figures.optimizer_ms)
    tokens = middle(figures.step_tokens)
    assert forward_backward is not None
    assert tokens is not None
    if isinstance(figures, RunFigures):
        rate: float | None = figures.tokens_per_second
        seconds = middle(figures.step_seconds)
        fill: Figure = figures.fill
    else:
        # A loop without an update is no training: it has no rate but that of its passes.
        seconds = None if optimizer is None else (forward_backward + optimizer) / 1e3
        rate = None if seconds is None else tokens / seconds
        fill = None
    passes = forward_backward / 1e3
    operations = flops.value * tokens
    peak = figures.peak_bytes
    named: dict[str, Figure] = {
        "tokens/s": rate,
        "fill": fill,
        "fwd+bwd ms": forward_backward,
        "optimizer ms": optimizer,
        "fwd+bwd tokens/s": tokens / passes,
        "fwd+bwd TFLOP/s": operations / passes / 1e12,
        "fwd+bwd MFU": bench.mfu(operations, seconds=passes),
        "MFU": None if seconds is None else bench.mfu(operations, seconds=seconds),
        "peak GiB": None if peak is None else peak / GIB,
        "start-up s": figures.startup_seconds,
        "first step s": figures.first_step_seconds,
        "last loss": figures.losses[-1],
    }
    bench.rows.put_figures(case, named)
