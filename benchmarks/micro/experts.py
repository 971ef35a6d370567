"""Whole training steps with experts on two CPU ranks, for each way to compute the experts.

One run has all ways: each takes its turn, step by step, in the same processes. Every step has all
rows of the data and leaves the weights as they are, so that loss and gradient norm are the same
numbers in all steps, but for rounding.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, Final
from unittest.mock import patch

from modes.levels_work import Work, write_levels_data
from rich.console import Console
from rich.table import Table

from loongplug.consoles import threadless_bars
from loongplug.verify.forked_runs import preload
from loongplug.verify.ranks import OnEvent, join, run_ranks

ONE_BY_ONE, JOINED, KERNEL = "one by one", "joined", "torch's grouped product"
WAYS: Final = (ONE_BY_ONE, JOINED, KERNEL)
RANKS: Final = 2
WORK: Final = Work(warmup=0, steps=1)
_MINUTES = 5.0
_WARMUP = 1  # turns of all ways


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What the steps of one way took, a figure for each."""

    tokens_per_second: tuple[float, ...]
    processor: tuple[float, ...]  # milliseconds of all ranks together

    @property
    def rate(self) -> float:
        """The median."""
        return median(self.tokens_per_second)


@dataclass(frozen=True, kw_only=True)
class ExpertsFigures:
    """What was measured, by way; how far losses and gradient norms are apart, relatively."""

    flags: tuple[str, ...]
    ways: dict[str, Steps]
    apart: float

    def ratio(self, way: str) -> float:
        """Tokens/s over those of experts one by one, by medians."""
        return self.ways[way].rate / self.ways[ONE_BY_ONE].rate

    def of_processor(self, way: str) -> float:
        """Processor time over that of experts one by one, by medians."""
        return median(self.ways[way].processor) / median(self.ways[ONE_BY_ONE].processor)


def run(
    *, flags: Sequence[str], steps: int, json_path: Path | None, work: Work = WORK
) -> ExpertsFigures:
    """Measure ``steps`` of each way, print a table, write the figures to ``json_path`` if given.

    ``flags`` of train.py come behind those of the tiny model with experts, spread over both ranks;
    ``work`` is one step.

    Raises:
        ValueError: the flags cannot be used.
        RankError: a rank failed otherwise.
    """
    if steps < 1:
        raise ValueError(f"--steps is {steps}: expected at least 1.")
    turns = _WARMUP + steps
    with (
        tempfile.TemporaryDirectory(prefix="loongplug-experts-") as name,
        threadless_bars() as progress,
    ):
        folder = Path(name)
        preload("cpu")
        write_levels_data(folder / "data", samples=work.samples)
        task = progress.add_task("steps", total=turns * len(WAYS))

        def stepped(line: str) -> None:
            progress.advance(task)
            progress.refresh()

        given = (
            *(*work.flags(folder / "data"), "--model-name", "qwen3_vl_moe_tiny"),
            *("--lr", "0", "--min-lr", "0", "--train-iters", str(turns * len(WAYS))),
            *("--expert-model-parallel-size", str(RANKS), *flags),
        )
        found: list[list[_Step]] = run_ranks(
            partial(_train, flags=given, turns=turns, folder=folder / "ranks"),
            RANKS,
            folder=folder / "ranks",
            on_event=stepped,
        )
    figures = _figures(found, flags=flags)
    _print(figures, steps=steps)
    if json_path is not None:
        ratios = {way: figures.ratio(way) for way in WAYS}
        json_path.write_text(json.dumps({**asdict(figures), "ratios": ratios}, indent=2) + "\n")
    return figures


def order(turns: int) -> list[str]:
    """The way of each step: every way once a turn, forwards and backwards by turns."""
    return [way for turn in range(turns) for way in (WAYS if turn % 2 else WAYS[::-1])]


@dataclass(frozen=True)
class _Step:
    """A step as one rank knows it; all but ``processor`` seconds is the same on every rank."""

    way: str
    rate: float  # tokens/s
    loss: float
    norm: float
    processor: float


def _train(
    rank: int, tell: OnEvent, *, flags: Sequence[str], turns: int, folder: Path
) -> list[_Step]:
    """The life of a rank: its steps behind the warm-up."""
    import torch.distributed as dist

    join(rank, folder=folder, device="cpu", minutes=_MINUTES)
    from loongplug.training.progress import StepReport
    from loongplug.training.run import run as train

    ways = order(turns)
    found: list[_Step] = []
    with _Ways() as experts:
        experts.take(ways[0])
        since = process_time()

        def after_step(report: StepReport) -> None:
            nonlocal since
            assert report.grad_norm is not None
            assert report.loss is not None
            worked, since = process_time() - since, process_time()
            way = ways[len(found)]
            found.append(
                _Step(
                    way,
                    report.scalars()["tokens per second"],
                    report.loss,
                    report.grad_norm,
                    worked,
                )
            )
            if len(found) < len(ways):
                experts.take(ways[len(found)])
            if rank == 0:
                tell(way)

        train(flags, watch=experts, on_report=after_step)
    dist.barrier()  # a rank that goes early would take its sockets from those that still talk
    return found[_WARMUP * len(WAYS) :]


class _Ways:
    """Changes the way in which this rank's layers of experts compute, while a run is under way.

    See :class:`loongplug.training.run.Watch`.
    """

    def __init__(self) -> None:
        self._layers: list[Any] = []
        self._kernel = False
        self._joined = True

    def __enter__(self) -> "_Ways":
        asked: Callable[..., bool] = lambda experts, tokens: self._kernel  # noqa: E731
        self._patch = patch("loongplug.models.layers.mlp.kernel_takes", asked)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def take(self, way: str) -> None:
        """From the next step on."""
        self._joined, self._kernel = way != ONE_BY_ONE, way == KERNEL
        for layer in self._layers:
            layer.joined = self._joined

    def built(self, chunks: Sequence[Any], optimizer: Any, *, mapping: Any) -> None:
        """Find the layers, and let them begin in the first step's way."""
        from loongplug.models.layers.mlp import LocalExperts

        modules = (module for chunk in chunks for module in chunk.modules())
        self._layers = [each for each in modules if isinstance(each, LocalExperts)]
        assert self._layers
        assert all(each.joined for each in self._layers)
        for layer in self._layers:
            layer.joined = self._joined

    def loss(self, microbatch: Any, report: Any) -> None:
        """Reports have the losses."""


def _figures(found: Sequence[Sequence[_Step]], *, flags: Sequence[str]) -> ExpertsFigures:
    steps = found[0]
    worked = [sum(each.processor for each in ranks) * 1e3 for ranks in zip(*found, strict=True)]
    of_way = {way: [n for n, step in enumerate(steps) if step.way == way] for way in WAYS}
    ways = {
        way: Steps(
            tokens_per_second=tuple(steps[n].rate for n in numbers),
            processor=tuple(worked[n] for n in numbers),
        )
        for way, numbers in of_way.items()
    }
    values = [[step.loss for step in steps], [step.norm for step in steps]]
    apart = max((max(each) - min(each)) / abs(median(each)) for each in values)
    return ExpertsFigures(flags=tuple(flags), ways=ways, apart=apart)


def _print(figures: ExpertsFigures, *, steps: int) -> None:
    table = Table(
        *("experts", "tokens/s, median (range)", "x one by one", "processor ms", "x one by one"),
        title=f"{steps} steps of each way in turn, {RANKS} ranks",
    )
    for way, taken in figures.ways.items():
        rates = taken.tokens_per_second
        table.add_row(
            way,
            f"{taken.rate:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
            f"{figures.ratio(way):.3f}",
            f"{median(taken.processor):.0f}",
            f"{figures.of_processor(way):.3f}",
        )
    console = Console()
    console.print(table)
    console.print(f"losses and gradient norms of all steps are {figures.apart:.1e} apart")
