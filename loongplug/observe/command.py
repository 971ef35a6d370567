"""``loongplug trace``: merge what the ranks wrote, draw one step, print where its time went."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from loongplug.consoles import table_console
from loongplug.observe.chrome import MERGED, write_chrome_trace
from loongplug.observe.picture import draw_timeline
from loongplug.observe.shares import Shares, sections, shares
from loongplug.observe.trace_file import RankTrace, TraceEvent, rank_file, read_folder
from loongplug.output_files import check_output, check_pictures

# Of the wider table; where lines are shorter they are broken by whoever shows them.
_WIDTH: Final = 132

# In the order in which people look for them.
_COLUMNS: Final = {
    "encoder_forward": "encoder\nforward",
    "encoder_backward": "encoder\nbackward",
    "forward": "decoder\nforward",
    "backward": "decoder\nbackward",
    "forward_backward": "decoder\nboth",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "data": "data",
    "exchange": "exchange",
    "waiting": "waiting",
    "idle": "idle",
}


def trace(folder: Path, *, step: int | None) -> None:
    """Write ``trace.json`` and ``timeline.png`` to ``folder`` and print two tables.

    ``step`` is the one to draw and to measure; None: the last that all ranks ran to its end.
    Raises ValueError for a folder without traces, for a step that is not whole on every rank, and
    without matplotlib.
    """
    check_output(folder / "trace.json", MERGED)
    check_pictures(folder, ["timeline.png"])
    traces = read_folder(folder)
    console = table_console(least=_WIDTH)
    for line in _missing(traces, folder):
        console.print(line, soft_wrap=True)
    write_chrome_trace(traces, folder / "trace.json")
    console.print(f"For https://ui.perfetto.dev: {folder / 'trace.json'}", soft_wrap=True)
    number = _step(traces, step)
    of_step = {
        each.rank: [event for event in each.events if event.step == number] for each in traces
    }
    measured = {rank: shares(_window(events), events) for rank, events in of_step.items()}
    draw_timeline(traces, measured, folder / "timeline.png", step=number)
    console.print(f"Step {number} as a picture: {folder / 'timeline.png'}", soft_wrap=True)
    console.print(_states_table(traces, measured, step=number))
    console.print(_sections_table(traces, of_step, step=number))


def _missing(traces: Sequence[RankTrace], folder: Path) -> list[str]:
    """What is not there, one sentence each."""
    lines = [
        f"{rank_file(folder, each.rank)}: its last line is not whole and was left out."
        for each in traces
        if each.cut_off
    ]
    absent = set(range(traces[0].world_size)) - {each.rank for each in traces}
    if absent:
        lines.append(f"Without ranks {', '.join(map(str, sorted(absent)))}: no file of theirs.")
    return lines


def _step(traces: Sequence[RankTrace], asked: int | None) -> int:
    whole = set.intersection(*(each.whole_steps() for each in traces))
    if not whole:
        raise ValueError(
            "no step was run to its end on all ranks: there is trace.json, but nothing to draw or"
            " to measure."
        )
    if asked is not None and asked not in whole:
        raise ValueError(
            f"--step is {asked}: expected one that all ranks ran to its end, from {min(whole)} to"
            f" {max(whole)}."
        )
    return max(whole) if asked is None else asked


def _window(events: Sequence[TraceEvent]) -> tuple[int, int]:
    (step,) = (event for event in events if event.phase == "step")
    return step.start, step.end


def _states_table(
    traces: Sequence[RankTrace], measured: Mapping[int, Shares], *, step: int
) -> Table:
    shown = [state for state in _COLUMNS if any(each.by_state[state] for each in measured.values())]
    table = _table(f"Step {step}: shares of each rank's time")
    for title in ("ms", *(_COLUMNS[state] for state in shown), "bubble", "computing\nin transfers"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in traces:
        own = measured[each.rank]
        whole = own.window[1] - own.window[0]
        table.add_row(
            each.label(),
            f"{whole / 1e6:,.1f}",
            *(f"{own.by_state[state] / whole:.1%}" for state in shown),
            f"{own.bubble:.1%}",
            f"{own.computing_in_transfers / whole:.1%}",
        )
    return table


def _sections_table(
    traces: Sequence[RankTrace], of_step: Mapping[int, Sequence[TraceEvent]], *, step: int
) -> Table:
    table = _table(f"Step {step}: bubble within each phase of the schedule")
    columns: dict[str, None] = {}
    rows = []
    for each in traces:
        events = of_step[each.rank]
        measured = {
            name: shares(window, events)
            for name, window in sections(_window(events), events).items()
        }
        columns |= dict.fromkeys(measured)
        rows.append((each.label(), measured))
    for name in columns:
        table.add_column(name, justify="right")
    for label, measured in rows:
        table.add_row(label, *(_of(measured.get(name)) for name in columns))
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("rank", no_wrap=True)
    return table


def _of(own: Shares | None) -> str:
    if own is None:
        return ""
    whole = own.window[1] - own.window[0]
    return f"{own.bubble:.1%} of {whole / 1e6:,.1f} ms" if whole else "none"
