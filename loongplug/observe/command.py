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

_WIDTH: Final = 132  # of the wider table

# The states in the order in which people look for them.
_COLUMNS: Final = (
    *("encoder_forward", "encoder_backward", "forward", "backward", "forward_backward"),
    *("gradients", "optimizer", "data", "exchange", "waiting", "idle"),
)
_TITLES: Final = {
    "forward": "decoder\nforward",
    "backward": "decoder\nbackward",
    "forward_backward": "decoder\nboth",
}


def trace(folder: Path, *, step: int | None) -> None:
    """Write ``trace.json`` and ``timeline.png`` to ``folder`` and print two tables.

    ``step`` is the one to draw and to measure; None: the last that all ranks ran to its end.
    """
    check_output(folder / "trace.json", MERGED)
    check_pictures(folder, ["timeline.png"])
    traces = read_folder(folder)
    console = table_console(least=_WIDTH)
    for each in traces:
        if each.cut_off:
            said = "its last line is not whole and was left out."
            console.print(f"{rank_file(folder, each.rank)}: {said}", soft_wrap=True)
    if absent := {*range(traces[0].world_size)} - {each.rank for each in traces}:
        ranks = ", ".join(map(str, sorted(absent)))
        console.print(f"Without ranks {ranks}: no file of theirs.", soft_wrap=True)
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
    titles = [_TITLES.get(state, state.replace("_", "\n")) for state in shown]
    table = _table(f"Step {step}: shares of each rank's time")
    for title in ("ms", *titles, "bubble", "computing\nin transfers"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in traces:
        own = measured[each.rank]
        table.add_row(
            each.label(),
            f"{own.whole / 1e6:,.1f}",
            *(f"{own.by_state[state] / own.whole:.1%}" for state in shown),
            f"{own.bubble:.1%}",
            f"{own.computing_in_transfers / own.whole:.1%}",
        )
    return table


def _sections_table(
    traces: Sequence[RankTrace], of_step: Mapping[int, Sequence[TraceEvent]], *, step: int
) -> Table:
    rows: dict[str, dict[str, str]] = {}
    for each in traces:
        events = of_step[each.rank]
        rows[each.label()] = {
            name: f"{own.bubble:.1%} of {own.whole / 1e6:,.1f} ms" if own.whole else "none"
            for name, window in sections(_window(events), events).items()
            for own in [shares(window, events)]
        }
    table = _table(f"Step {step}: bubble within each phase of the schedule")
    names = dict.fromkeys(name for row in rows.values() for name in row)
    for name in names:
        table.add_column(name, justify="right")
    for label, row in rows.items():
        table.add_row(label, *(row.get(name, "") for name in names))
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("rank", no_wrap=True)
    return table
