"""What ``bench.py levels`` makes of its runs: ratios, phases, bytes, tables of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from loongplug.bench.step import spread
from loongplug.consoles import table_console
from loongplug.observe.shares import (
    Interval,
    Shares,
    difference,
    intersection,
    length,
    shares,
    states,
    union,
)
from loongplug.observe.trace_file import RankTrace, TraceEvent
from modes.levels_work import UNIFORM, Work

# What of a step is shown, and which states of a trace that is.
PHASES: Final[Mapping[str, tuple[str, ...]]] = {
    "encoder forward": ("encoder_forward",),
    "encoder backward": ("encoder_backward",),
    "decoder forward": ("forward",),
    "decoder backward": ("backward",),
    "exchange": ("exchange",),
    "waiting": ("waiting",),
    "optimizer": ("optimizer", "gradients"),
    "data": ("data",),
    "idle": ("idle",),
}
ENCODER: Final = ("encoder forward", "encoder backward")
DECODER: Final = ("decoder forward", "decoder backward")
BUBBLE: Final = ("exchange", "waiting", "data", "idle")


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


@dataclass(frozen=True, kw_only=True)
class TracedFigures:
    """Of one run with a trace; medians of its steps after the warm-up."""

    phase_ms: tuple[Mapping[str, float], ...]  # of every rank
    exchange_bytes: float  # of a step, sent by all ranks together
    clock_ms: float | None = None  # what the step should take by the clock, of its phases

    @property
    def encoder_share(self) -> float:
        """Of the model's computing on all ranks, transfers within it included."""
        encoder = sum(rank[phase] for rank in self.phase_ms for phase in ENCODER)
        decoder = sum(rank[phase] for rank in self.phase_ms for phase in DECODER)
        return encoder / (encoder + decoder)

    @property
    def step_ms(self) -> float:
        """Of the first rank, whose phases fill it."""
        return sum(self.phase_ms[0].values())

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Of every rank, the share of its step in which it does not compute."""
        return tuple(
            sum(rank[phase] for phase in BUBBLE) / sum(rank.values()) for rank in self.phase_ms
        )


@dataclass(frozen=True, kw_only=True)
class LevelFigures:
    """One level in one setting. Rates and ratios are by round."""

    level: str
    flags: tuple[str, ...]
    tokens_per_second: tuple[float, ...]
    ratios: tuple[float, ...]  # to uniform's rate of the same round
    loss_difference: float  # the largest of all steps, to uniform's
    processor_seconds: tuple[float, ...]  # of every rank, a step; the median round's
    peak_memory_bytes: tuple[int, ...]  # of every rank, the most of all rounds
    traced: TracedFigures
    picture: str

    @property
    def ratio(self) -> float:
        """The median round's."""
        return median(self.ratios)


@dataclass(frozen=True, kw_only=True)
class SettingFigures:
    """All levels in one setting.

    ``splits`` holds the median tokens/s of each split of layers that was tried, by the first
    stage's layers.
    """

    setting: str
    ranks: int
    splits: Mapping[int, float]
    levels: tuple[LevelFigures, ...]

    @property
    def encoder_share(self) -> float:
        """Of the work, as uniform does it."""
        return next(each for each in self.levels if each.level == UNIFORM).traced.encoder_share


def median_rate(runs: Sequence[RunFigures]) -> float:
    """Tokens/s of the median round."""
    return median(run.tokens_per_second for run in runs)


def fastest(runs: Mapping[tuple[str, ...], Sequence[RunFigures]]) -> tuple[str, ...]:
    """The variant, by its flags, with the highest median rate."""
    return max(runs, key=lambda flags: median_rate(runs[flags]))


def level_figures(
    level: str,
    runs: Sequence[RunFigures],
    uniform: Sequence[RunFigures],
    *,
    flags: tuple[str, ...],
    traced: TracedFigures,
    picture: str,
) -> LevelFigures:
    """Of one level's runs and uniform's, both by round."""
    rates = tuple(run.tokens_per_second for run in runs)
    peaks_by_rank = zip(*(run.peak_memory_bytes for run in runs), strict=True)
    processor_by_rank = zip(*(run.processor_seconds for run in runs), strict=True)
    return LevelFigures(
        level=level,
        flags=flags,
        tokens_per_second=rates,
        ratios=tuple(
            rate / other.tokens_per_second for rate, other in zip(rates, uniform, strict=True)
        ),
        loss_difference=max(
            abs(loss - other_loss)
            for run, other in zip(runs, uniform, strict=True)
            for loss, other_loss in zip(run.losses, other.losses, strict=True)
        ),
        processor_seconds=tuple(median(seconds) for seconds in processor_by_rank),
        peak_memory_bytes=tuple(max(peaks) for peaks in peaks_by_rank),
        traced=traced,
        picture=picture,
    )


def traced_figures(traces: Sequence[RankTrace], *, warmup: int) -> TracedFigures:
    """Of every rank's trace; the first ``warmup`` steps do not count."""
    numbers = _steps(traces, warmup=warmup)
    sent = [
        sum(
            event.details.get("bytes", 0)  # waiting for sends has none
            for trace in traces
            for event in trace.events
            if event.step == number and event.phase == "exchange"
            if "source" not in event.details  # its sender has them
        )
        for number in numbers
    ]
    return TracedFigures(
        phase_ms=tuple(
            {
                phase: median(phases(*_step(trace, number))[phase] for number in numbers) / 1e6
                for phase in PHASES
            }
            for trace in traces
        ),
        exchange_bytes=median(sent),
    )


def phases(window: Interval, events: Sequence[TraceEvent]) -> dict[str, int]:
    """Nanoseconds of a rank's step by phase; together they are the step.

    An exchange within a forward or a backward counts as an exchange here.
    """
    exchanging = union((event.start, event.end) for event in events if event.phase == "exchange")
    exchanging = intersection([window], exchanging)
    by_state = {
        state: length(difference(intervals, exchanging))
        for state, intervals in states(window, events).items()
    }
    by_state["exchange"] = length(exchanging)
    return {phase: sum(by_state[state] for state in found) for phase, found in PHASES.items()}


def shown_step(traces: Sequence[RankTrace], *, warmup: int) -> tuple[int, dict[int, Shares]]:
    """The step to draw, which is the one of median length, with its shares by rank."""
    numbers = _steps(traces, warmup=warmup)

    def took(number: int) -> int:
        start, end = _step(traces[0], number)[0]
        return end - start

    number = sorted(numbers, key=took)[len(numbers) // 2]
    return number, {trace.rank: shares(*_step(trace, number)) for trace in traces}


def _steps(traces: Sequence[RankTrace], *, warmup: int) -> list[int]:
    whole = set.intersection(*(trace.whole_steps() for trace in traces))
    return sorted(number for number in whole if number > warmup)


def _step(trace: RankTrace, number: int) -> tuple[Interval, list[TraceEvent]]:
    events = [event for event in trace.events if event.step == number]
    (step,) = (event for event in events if event.phase == "step")
    return (step.start, step.end), events


_WIDTH = 132  # of the wider table
_MIB = 2**20


def print_settings(settings: Sequence[SettingFigures], *, console: Console) -> None:
    """Two tables for each setting."""
    for figures in settings:
        console.print(rates_table(figures))
        console.print(phases_table(figures))


def rates_table(figures: SettingFigures) -> Table:
    """Speed, what an exchange moves, memory; one row for each level."""
    table = Table(title=_title(figures), title_justify="left")
    table.add_column("level", no_wrap=True)
    for title in (
        "tokens/s, median (range)",
        "x uniform",
        "processor ms\nper step by rank",
        "exchanged\nMB per step",
        "peak MiB\nby rank",
        "losses apart\nby at most",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for each in figures.levels:
        table.add_row(
            each.level,
            spread(each.tokens_per_second, form=",.0f"),
            spread(each.ratios, form=".2f"),
            " ".join(f"{seconds * 1e3:,.0f}" for seconds in each.processor_seconds),
            f"{each.traced.exchange_bytes / 1e6:.2f}",
            " ".join(f"{peak / _MIB:,.0f}" for peak in each.peak_memory_bytes),
            f"{each.loss_difference:.1e}",
        )
    return table


def phases_table(figures: SettingFigures) -> Table:
    """Milliseconds of a step, one row for each rank of each level."""
    table = Table(title="ms per step", title_justify="left")
    table.add_column("level", no_wrap=True)
    table.add_column("rank", justify="right")
    for phase in PHASES:
        table.add_column(phase.replace(" ", "\n"), justify="right")
    table.add_column("bubble\nof step", justify="right")
    table.add_column("step by\nthe clock", justify="right")
    for each in figures.levels:
        bubbles = each.traced.bubbles
        for rank, took in enumerate(each.traced.phase_ms):
            table.add_row(
                each.level if rank == 0 else "",
                str(rank),
                *(f"{took[phase]:,.0f}" for phase in PHASES),
                f"{bubbles[rank]:.0%}",
                _beside_the_clock(each.traced) if rank == 0 else "",
            )
        table.add_section()
    return table


def _beside_the_clock(traced: TracedFigures) -> str:
    clock = traced.clock_ms
    return "" if clock is None else f"{clock:,.0f}: {clock / traced.step_ms:.2f}"


def wide_console() -> Console:
    """As wide as the tables, whatever the terminal is."""
    return table_console(least=_WIDTH)


def as_json(settings: Sequence[SettingFigures], *, work: Work, rounds: int) -> dict[str, Any]:
    """All figures, round by round."""
    return {
        "work": dataclasses.asdict(work),
        "rounds": rounds,
        "settings": [
            dataclasses.asdict(each) | {"encoder_share": each.encoder_share} for each in settings
        ],
    }


def _title(figures: SettingFigures) -> str:
    tuned = ""
    if figures.splits:
        tried = ", ".join(f"{first}: {rate:,.0f}" for first, rate in figures.splits.items())
        tuned = f"; first-stage layers tried: tokens/s are {tried}"
    return (
        f"{figures.setting}, {figures.ranks} ranks; the encoder is {figures.encoder_share:.0%} of"
        f" the work{tuned}"
    )
