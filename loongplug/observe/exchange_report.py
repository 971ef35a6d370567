"""What ``loongplug trace`` shows of the exchanges of experts' tokens: a table and a picture."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from loongplug.observe.exchanges import (
    EXCHANGES,
    SECTIONS,
    CombinedStep,
    Node,
    TracedExchange,
    combined_steps,
    exchanges,
    slots,
)
from loongplug.observe.trace_file import RankTrace, TraceEvent
from loongplug.output_files import MADE_BY

_COLOURS: Final = {"forward": "#9ecae1", "backward": "#fdae6b", "wgrad": "#fdd0a2"}
_SHORT: Final = {
    "pre_process": "input",
    "pre_dispatch_computation": "attention",
    "moe_dispatch": "dispatch",
    "mlp": "experts",
    "moe_combine": "combine",
    "post_process": "output",
}
_DRAWN: Final = 18  # slots of time, that is some four layers of both passes


def combined_by_rank(of_step: Mapping[int, Sequence[TraceEvent]]) -> dict[int, list[CombinedStep]]:
    """Each rank's combined steps; empty where no rank has nodes in its trace."""
    found = {
        rank: [each for each in combined_steps(events) if each.nodes]
        for rank, events in of_step.items()
    }
    return found if any(found.values()) else {}


def exchange_table(
    traces: Sequence[RankTrace], steps: Mapping[int, Sequence[CombinedStep]], table: Table
) -> Table:
    """Fill ``table``, whose first column is the rank, with a line for each kind of exchange."""
    table.add_column("exchange", no_wrap=True)
    for section in SECTIONS:
        table.add_column(section, justify="right", no_wrap=True)
    table.add_column("what computes beside it in the steady state")
    for each in traces:
        found = [one for step in steps[each.rank] for one in exchanges(step)]
        for number, kind in enumerate(EXCHANGES.values()):
            own = [one for one in found if one.node.label() == kind]
            table.add_row(
                "" if number else each.label(),
                kind,
                *(_covered([one for one in own if one.section == part]) for part in SECTIONS),
                _names(one for one in own if one.section == "steady"),
            )
    return table


def _covered(found: Sequence[TracedExchange]) -> str:
    return f"{sum(one.covered for one in found)} of {len(found)}" if found else ""


def _names(found: Any) -> str:
    counts = Counter(other.label() for one in found for other in one.beside)
    return ", ".join(f"{name} ({number})" for name, number in counts.most_common())


def draw_exchanges(
    traces: Sequence[RankTrace],
    steps: Mapping[int, Sequence[CombinedStep]],
    path: Path,
    *,
    step: int,
) -> bool:
    """Draw each rank's middle combined step of the steady state, its first layers.

    Boxes are in the order in which they were enqueued, each as soon as what it waits for is over,
    and all equally long. Writes nothing, and gives False, where no rank has a steady state.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn: list[tuple[str, Sequence[Node]]] = []  # a rank's label, and its nodes
    for trace in traces:
        steady = [one for one in steps[trace.rank] if one.section == "steady"]
        if steady:
            drawn.append((trace.label(), steady[len(steady) // 2].nodes))
    if not drawn:
        return False
    figure = Figure(figsize=(15, 1.2 + 1.15 * min(len(drawn), 64)), layout="constrained")
    axes = figure.add_subplot()
    length = 0
    for number, (_, nodes) in enumerate(drawn):
        length = max(length, _draw_step(axes, nodes, top=2.5 * number))
    axes.set_yticks(
        [2.5 * number + lane for number in range(len(drawn)) for lane in (0, 1)],
        [
            f"rank {label}\n{stream}" if stream == "communication" else stream
            for label, _ in drawn
            for stream in ("communication", "computation")
        ],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_xlim(0, length)
    figure.set_figwidth(2.4 + 0.8 * length)
    axes.set_xticks([])
    axes.set_title(f"step {step}, numbers are microbatch / layer", loc="left", fontsize=10)
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)
    there = {node.direction for _, nodes in drawn for node in nodes}
    patches = [
        Patch(facecolor=colour, label=name) for name, colour in _COLOURS.items() if name in there
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110, metadata=MADE_BY)
    return True


def _draw_step(axes: Any, nodes: Sequence[Node], *, top: float) -> int:
    """Two lanes from ``top`` on; gives their length."""
    length = 0
    for node, slot in zip(nodes, slots(nodes), strict=True):
        if slot >= _DRAWN:
            continue
        length = max(length, slot + 1)
        lane = top + (1 if node.computes else 0)
        axes.broken_barh(
            [(slot, 1)],
            (lane - 0.45, 0.9),
            facecolors=_COLOURS[node.direction],
            edgecolor="white",
        )
        place = "" if node.layer is None else f" / {node.layer}"
        text = f"{_SHORT.get(node.name, node.name)}\n{node.microbatch}{place}"
        axes.text(slot + 0.5, lane, text, ha="center", va="center", fontsize=7)
    return length
