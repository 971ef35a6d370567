"""What ``bench.py pipeline`` makes of its runs: ratios, bubbles, a picture in text, JSON."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from loongplug.bench.step import spread
from loongplug.observe.shares import Interval, Shares, intersection, length, shares, states
from loongplug.observe.trace_file import RankTrace, TraceEvent
from modes.pipeline_clock import predicted
from modes.pipeline_ranks import EMPTY_STEPS, RankFigures
from modes.pipeline_work import Case

# Of a lane of the picture: capitals are the decoder's, small letters an encoder's.
LETTERS: Final[Mapping[str, str]] = {
    "forward": "F",
    "backward": "B",
    "encoder_forward": "f",
    "encoder_backward": "b",
}
NOTHING: Final = "."


@dataclass(frozen=True, kw_only=True)
class CaseFigures:
    """Milliseconds of one case. ``shown`` is a step as a trace has it, that of median length.

    A step is from when the first rank begins until the last one ends. ``empty`` is one without
    work: what the harness takes at most. ``work`` is each rank's in a step; ``predicted`` the
    clock's. ``bubbles`` are, by rank, what of a step is no work; medians.
    """

    case: Case
    step: tuple[float, ...]
    empty: float
    work: tuple[float, ...]
    bubbles: tuple[float, ...]
    predicted: float
    shown: tuple[RankTrace, ...]

    @property
    def median(self) -> float:
        """Of the steps."""
        return median(self.step)

    @property
    def over_busiest(self) -> float:
        """How many times what its busiest rank has to do; 1 is perfect for this mode."""
        return self.median / max(self.work)

    @property
    def over_even(self) -> float:
        """How many times what each rank would have to do if all had the same; 1 is perfect."""
        return self.median / (sum(self.work) / len(self.work))

    @property
    def over_predicted(self) -> float:
        """How many times what the clock says."""
        return self.median / self.predicted


def case_figures(case: Case, ranks: Sequence[RankFigures]) -> CaseFigures:
    """Of what the case's ranks say, in their order."""
    steps = range(EMPTY_STEPS + 1, len(ranks[0].work) + 1)
    events = {step: [_events(each, step) for each in ranks] for step in (EMPTY_STEPS, *steps)}
    windows = {step: _window(chain(*of_ranks)) for step, of_ranks in events.items()}
    took = {step: (end - start) / 1e6 for step, (start, end) in windows.items()}
    shown = sorted(steps, key=lambda step: took[step])[len(steps) // 2]
    return CaseFigures(
        case=case,
        step=tuple(took[step] for step in steps),
        empty=took[EMPTY_STEPS],
        work=tuple(each.work[-1] for each in ranks),
        bubbles=tuple(
            median(shares(windows[step], events[step][rank]).bubble for step in steps)
            for rank in range(len(ranks))
        ),
        predicted=predicted(case),
        shown=tuple(
            RankTrace(
                rank=number,
                world_size=len(ranks),
                device="cpu",
                place=each.place,
                events=tuple(events[shown][number]),
                cut_off=False,
            )
            for number, each in enumerate(ranks)
        ),
    )


def _events(rank: RankFigures, step: int) -> list[TraceEvent]:
    return [event for event in rank.events if event.step == step]


def _window(events: Iterable[TraceEvent]) -> Interval:
    """Of the events of all ranks in a step: from when the first begins to when the last ends."""
    whole = [event for event in events if event.phase == "step"]
    return min(event.start for event in whole), max(event.end for event in whole)


def _window_of(traces: Sequence[RankTrace]) -> Interval:
    return _window(event for trace in traces for event in trace.events)


def shown_shares(figures: CaseFigures) -> dict[int, Shares]:
    """Of the shown step, by rank, in the window that is all ranks'."""
    window = _window_of(figures.shown)
    return {trace.rank: shares(window, trace.events) for trace in figures.shown}


def timeline(traces: Sequence[RankTrace], *, width: int) -> list[str]:
    """A step of all ranks, a line each: so many columns, each with what took most of its time.

    ``LETTERS`` say what; a column that is mostly no work has a dot.
    """
    start, end = _window_of(traces)
    edges = [start + (end - start) * column // width for column in range(width + 1)]
    lines = []
    for trace in traces:
        found = states((start, end), trace.events)
        lanes = {letter: found[state] for state, letter in LETTERS.items()}
        columns = [_letter(lanes, (edges[column], edges[column + 1])) for column in range(width)]
        lines.append("".join(columns))
    return lines


def _letter(lanes: Mapping[str, Sequence[Interval]], column: Interval) -> str:
    took = {letter: length(intersection(lane, [column])) for letter, lane in lanes.items()}
    took[NOTHING] = column[1] - column[0] - sum(took.values())
    return max(took, key=lambda letter: took[letter])


def print_cases(found: Sequence[CaseFigures], *, console: Console) -> None:
    """A table of all cases."""
    table = Table(
        title="milliseconds of a step",
        caption="over busiest, over even: times what the busiest rank has to do, and what each "
        "would if all had the same; empty: a step whose work takes no time",
    )
    table.add_column("mode")
    for heading in ("ranks", "step, median (range)", "over busiest", "over even"):
        table.add_column(heading, justify="right")
    table.add_column("clock", justify="right")
    table.add_column("bubble by rank")
    table.add_column("empty", justify="right")
    for each in found:
        table.add_row(
            each.case.mode,
            str(each.case.ranks),
            spread(each.step, form=",.0f"),
            f"{each.over_busiest:.3f}",
            f"{each.over_even:.3f}",
            f"{each.predicted:,.0f} ({each.over_predicted:.3f})",
            " ".join(f"{bubble:.0%}" for bubble in each.bubbles),
            f"{each.empty:,.0f}",
        )
    console.print(table)


def print_timeline(figures: CaseFigures, *, console: Console, width: int) -> None:
    """The shown step, as wide as it may be."""
    labels = [trace.label() for trace in figures.shown]
    room = max(map(len, labels))
    lines = timeline(figures.shown, width=max(20, width - room - 1))
    console.print(f"{figures.case.mode}, {figures.median:,.0f} ms", markup=False)
    for label, line in zip(labels, lines, strict=True):
        console.print(f"{label:<{room}} {line}", markup=False, highlight=False, soft_wrap=True)


def legend() -> str:
    """What the letters of a picture are."""
    names = {letter: state.replace("_", " ") for state, letter in LETTERS.items()}
    return ", ".join(f"{letter} {name}" for letter, name in names.items()) + f", {NOTHING} no work"


def as_json(found: Sequence[CaseFigures]) -> list[dict[str, Any]]:
    """All figures, in milliseconds; no events."""
    return [
        {
            "case": dataclasses.asdict(each.case),
            "step": each.step,
            "empty": each.empty,
            "work": each.work,
            "bubbles": each.bubbles,
            "predicted": each.predicted,
            "over_busiest": each.over_busiest,
            "over_even": each.over_even,
        }
        for each in found
    ]
