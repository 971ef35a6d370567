"""One run of ``loongplug bench levels`` on forked ranks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from loongplug.verify.ranks import OnEvent, join, run_ranks

_COLLECTIVE_MINUTES = 5.0
_RUN_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What a run measured after its warm-up; ``losses`` are those of all steps."""

    step_seconds: tuple[float, ...]
    step_tokens: tuple[int, ...]  # before padding
    losses: tuple[float, ...]
    processor_seconds: tuple[float, ...]  # of every rank, a step
    peak_memory_bytes: tuple[int, ...]  # of every rank, what it inherited by its fork included

    @property
    def tokens_per_second(self) -> float:
        """The median step's."""
        return median(
            tokens / seconds
            for tokens, seconds in zip(self.step_tokens, self.step_seconds, strict=True)
        )


def measured_run(
    flags: Sequence[str], *, ranks: int, warmup: int, folder: Path, on_step: Callable[[], None]
) -> RunFigures:
    """Train as ``flags`` say. ``folder`` is new; logs of the ranks stay there.

    Raises:
        ValueError: the flags cannot be used.
        RankError: a rank failed otherwise.
    """
    folder.mkdir(parents=True)
    figures = run_ranks(
        partial(_train, flags=flags, warmup=warmup, folder=folder),
        ranks,
        folder=folder / "ranks",
        on_event=lambda line: on_step(),
        timeout=_RUN_SECONDS,
    )
    first: RunFigures = figures[0]
    return RunFigures(
        step_seconds=first.step_seconds,
        step_tokens=first.step_tokens,
        losses=first.losses,
        processor_seconds=tuple(own for each in figures for own in each.processor_seconds),
        peak_memory_bytes=tuple(peak for each in figures for peak in each.peak_memory_bytes),
    )


def _train(
    rank: int, tell: OnEvent, *, flags: Sequence[str], warmup: int, folder: Path
) -> RunFigures:
    """The life of a rank; its processor time and its peak memory are its own alone."""
    import torch.distributed as dist

    from loongplug.training.progress import StepReport

    platform = join(rank, folder=folder, device="cpu", minutes=_COLLECTIVE_MINUTES)
    from loongplug.training.run import run

    processor: list[float] = []  # by step, since the process began

    def after_step(report: StepReport) -> None:
        processor.append(time.process_time())
        if report.iteration == warmup:
            platform.reset_peak_memory()
        if rank == 0:
            tell(f"step {report.iteration}")

    reports = run(flags, on_report=after_step)
    peak = platform.peak_memory_bytes()
    dist.barrier()  # a rank that goes early would take its sockets from those that still talk
    return RunFigures(
        step_seconds=tuple(report.seconds for report in reports[warmup:]),
        step_tokens=tuple(report.tokens for report in reports[warmup:]),
        losses=tuple(report.loss for report in reports),
        processor_seconds=(_mean_step(processor[max(warmup - 1, 0) :]),),
        peak_memory_bytes=(peak,),
    )


def _mean_step(clock: Sequence[float]) -> float:
    """Between the first and the last reading; 0 where there is one alone."""
    return (clock[-1] - clock[0]) / max(len(clock) - 1, 1)
