"""The levels of heterogeneous parallelism, side by side: same model, data, weights and ranks.

Every level takes its turn in every round. All runs load the same weights and see the same samples
in the same order, so that their losses agree; how far they do is among the figures.
"""

import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.progress import Progress

from loongplug.consoles import threadless_bars
from loongplug.observe.picture import draw_timeline
from loongplug.observe.trace_file import read_folder
from loongplug.output_files import check_pictures, write_figures
from loongplug.verify.forked_runs import preload
from loongplug.verify.ranks import OnEvent, join, run_ranks
from modes import LEVELS
from modes.levels_clock import clock_ms
from modes.levels_figures import (
    RunFigures,
    SettingFigures,
    TracedFigures,
    as_json,
    fastest,
    level_figures,
    median_rate,
    print_settings,
    shown_step,
    traced_figures,
    wide_console,
)
from modes.levels_work import (
    SETTINGS,
    UNIFORM,
    Setting,
    Work,
    level_variants,
    split_candidates,
    split_flags,
    write_levels_data,
)

_COLLECTIVE_MINUTES = 5.0
_RUN_SECONDS = 600.0


def bench_levels(
    *,
    rounds: int,
    json_path: Path | None,
    pictures: Path,
    work: Work | None = None,
    settings: Sequence[Setting] = SETTINGS,
) -> list[SettingFigures]:
    """Measure, print tables, draw a step of every level into ``pictures``.

    Raises:
        ValueError: ``rounds`` is below 1, matplotlib is missing, or a run's flags were refused.
        RankError: a run failed otherwise.
    """
    names = [_picture_name(each, level) for each in settings for level in each.levels]
    check_pictures(pictures, names)
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}: expected at least 1.")
    work = work or Work()
    pictures.mkdir(parents=True, exist_ok=True)
    preload("cpu")
    with (
        tempfile.TemporaryDirectory(prefix="loongplug-levels-") as name,
        _forked_from(),
        threadless_bars() as progress,
    ):
        progress.add_task("levels", total=_iterations(settings, work, rounds=rounds))
        bench = _Bench(Path(name), work=work, progress=progress)
        figures = bench.measure(settings, rounds=rounds, pictures=pictures)
    console = wide_console()
    print_settings(figures, console=console)
    console.print(f"A step of each level as a picture: {pictures}", soft_wrap=True)
    write_figures(json_path, as_json(figures, work=work, rounds=rounds), LEVELS)
    return figures


class _Bench:
    """The runs, each in a folder of its own below ``root``."""

    def __init__(self, root: Path, *, work: Work, progress: Progress) -> None:
        self._root = root
        self._work = work
        self._progress = progress
        self._runs = 0
        write_levels_data(root / "data", samples=work.samples)
        self._run(
            Setting(name="weights"),
            ("--lr", "0", "--min-lr", "0", "--train-iters", "1", "--save-hf", self._weights),
            warmup=0,
        )

    @property
    def _weights(self) -> str:
        return str(self._root / "weights")

    def measure(
        self, settings: Sequence[Setting], *, rounds: int, pictures: Path
    ) -> list[SettingFigures]:
        """All variants of all levels in turn, then each level once more with a trace."""
        runs: dict[tuple[str, tuple[str, ...]], list[RunFigures]] = defaultdict(list)
        for number in range(rounds):
            for setting in settings:
                variants = [
                    flags
                    for level in setting.levels
                    for flags in level_variants(level, self._work, setting)
                ]
                # The first level of a round is the last of the next.
                for flags in variants[:: -1 if number % 2 else 1]:
                    runs[setting.name, flags].append(self._loaded(setting, flags))
        return [
            self._figures(
                setting,
                {flags: found for (name, flags), found in runs.items() if name == setting.name},
                pictures=pictures,
            )
            for setting in settings
        ]

    def _figures(
        self,
        setting: Setting,
        runs: Mapping[tuple[str, ...], Sequence[RunFigures]],
        *,
        pictures: Path,
    ) -> SettingFigures:
        (uniform,) = level_variants(UNIFORM, self._work, setting)
        levels = []
        for level in setting.levels:
            flags = fastest(
                {each: runs[each] for each in level_variants(level, self._work, setting)}
            )
            picture = pictures / _picture_name(setting, level)
            levels.append(
                level_figures(
                    level,
                    runs[flags],
                    runs[uniform],
                    flags=flags,
                    traced=self._traced(level, setting, flags, picture=picture),
                    picture=str(picture),
                )
            )
        splits = split_candidates(self._work.decoder_layers, setting.pp)
        return SettingFigures(
            setting=setting.name,
            ranks=setting.ranks,
            splits={first: median_rate(runs[split_flags(first)]) for first in splits},
            levels=tuple(levels),
        )

    def _traced(
        self, level: str, setting: Setting, flags: tuple[str, ...], *, picture: Path
    ) -> TracedFigures:
        warmup = self._work.warmup
        folder = self._root / f"trace-{self._runs}"
        self._loaded(setting, (*flags, "--trace", str(folder)))
        traces = read_folder(folder)
        step, measured = shown_step(traces, warmup=warmup)
        draw_timeline(traces, measured, picture, step=step)
        found = traced_figures(traces, warmup=warmup)
        if setting.dp > 1:  # replicas wait for one another's gradients, of which a case knows none
            return found
        count = self._work.microbatches
        return replace(found, clock_ms=clock_ms(level, setting, found.phase_ms, microbatches=count))

    def _loaded(self, setting: Setting, flags: tuple[str, ...]) -> RunFigures:
        return self._run(setting, ("--load-hf", self._weights, *flags), warmup=self._work.warmup)

    def _run(self, setting: Setting, flags: tuple[str, ...], *, warmup: int) -> RunFigures:
        self._runs += 1
        return measured_run(
            [*self._work.flags(self._root / "data"), *setting.flags, *flags],
            ranks=setting.ranks,
            warmup=warmup,
            folder=self._root / f"run-{self._runs}",
            on_step=self._stepped,
        )

    def _stepped(self) -> None:
        for task in self._progress.task_ids:
            self._progress.advance(task)
        self._progress.refresh()


def _iterations(settings: Sequence[Setting], work: Work, *, rounds: int) -> int:
    """Steps of all runs together; the one that makes the weights has one."""
    runs = sum(
        rounds * sum(len(level_variants(level, work, setting)) for level in setting.levels)
        + len(setting.levels)
        for setting in settings
    )
    return 1 + runs * work.iterations


@contextmanager
def _forked_from() -> Iterator[None]:
    """Ranks do not look through what they have inherited each time that they collect garbage."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _picture_name(setting: Setting, level: str) -> str:
    return f"{setting.name} {level}.png".replace(" ", "_").lower()


def measured_run(
    flags: Sequence[str], *, ranks: int, warmup: int, folder: Path, on_step: Callable[[], None]
) -> RunFigures:
    """Train as ``flags`` say. ``folder`` is new; logs of the ranks stay there.

    Raises:
        ValueError: the flags cannot be used.
        RankError: a rank failed otherwise.
    """
    folder.mkdir(parents=True)
    figures: list[RunFigures] = run_ranks(
        partial(_train, flags=flags, warmup=warmup, folder=folder),
        ranks,
        folder=folder / "ranks",
        on_event=lambda line: on_step(),
        timeout=_RUN_SECONDS,
    )
    return replace(
        figures[0],
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
    dist.barrier()  # a rank that ends early closes its sockets while others still use them
    return RunFigures(
        step_seconds=tuple(report.seconds for report in reports[warmup:]),
        step_tokens=tuple(report.tokens for report in reports[warmup:]),
        losses=tuple(report.loss for report in reports if report.loss is not None),
        processor_seconds=(_mean_step(processor[max(warmup - 1, 0) :]),),
        peak_memory_bytes=(peak,),
    )


def _mean_step(clock: Sequence[float]) -> float:
    """Between the first and the last reading; 0 where there is one alone."""
    return (clock[-1] - clock[0]) / max(len(clock) - 1, 1)
