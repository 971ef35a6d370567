"""One step of all ranks as a picture: a lane per rank, a colour per state."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from loongplug.observe.shares import Interval, Shares, intersection, states, union
from loongplug.observe.trace_file import RankTrace, TraceEvent
from loongplug.output_files import MADE_BY

_COLOURS = {
    "encoder_forward": "#2a9d8f",
    "encoder_backward": "#1d6f66",
    "optimizer": "#7d5ba6",
    "gradients": "#b79fd0",
    "forward_backward": "#d96c4a",
    "exchange": "#e9c46a",
    "waiting": "#c9c9c9",
    "data": "#8d6e63",
    "idle": "#f3f3f3",
}
# By virtual chunk: light to dark, as far as there are shades.
_FORWARD = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5")
_BACKWARD = ("#fdd0a2", "#fdae6b", "#f16913", "#d94801")

# A box narrower than this share of the step has no room for its microbatch's number.
_READABLE = 0.012


def draw_timeline(
    traces: Sequence[RankTrace], measured: Mapping[int, Shares], path: Path, *, step: int
) -> None:
    """Write the picture of ``step``; ``measured`` holds that step's shares by rank."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    origin = min(each.window[0] for each in measured.values())
    last = max(each.window[1] for each in measured.values())
    figure = Figure(figsize=(13, 1.7 + 0.45 * min(len(traces), 64)), layout="constrained")
    axes = figure.add_subplot()
    legend: dict[str, str] = {}  # colour by label, in the order in which they were met
    for lane, trace in enumerate(traces):
        events = [event for event in trace.events if event.step == step]
        window = measured[trace.rank].window
        for label, colour, intervals in _boxes(window, events):
            if intervals:
                legend[label] = colour
                spans = [((start - origin) / 1e6, (end - start) / 1e6) for start, end in intervals]
                axes.broken_barh(spans, (lane - 0.4, 0.8), facecolors=colour, linewidth=0)
        for event in events:
            microbatch = event.details.get("microbatch")
            wide = event.end - event.start >= _READABLE * (last - origin)
            if event.phase in ("forward", "backward") and microbatch is not None and wide:
                middle = ((event.start + event.end) / 2 - origin) / 1e6
                axes.text(middle, lane, str(microbatch), ha="center", va="center", fontsize=8)
    axes.set_yticks(
        range(len(traces)),
        [f"rank {each.label()}\nbubble {measured[each.rank].bubble:.0%}" for each in traces],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_xlim(0, (last - origin) / 1e6)
    axes.set_xlabel("milliseconds")
    axes.set_title(f"step {step}", loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    patches = [
        Patch(facecolor=colour, edgecolor="#999999", linewidth=0.4, label=label)
        for label, colour in legend.items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110, metadata=MADE_BY)


def _boxes(window: Interval, events: Sequence[TraceEvent]) -> list[tuple[str, str, list[Interval]]]:
    """What is drawn of a lane: label, colour, when. Forward and backward are told by chunk."""
    boxes = []
    for state, intervals in states(window, events).items():
        shades = {"forward": _FORWARD, "backward": _BACKWARD}.get(state)
        if shades is None:
            boxes.append((state.replace("_", " "), _COLOURS[state], intervals))
            continue
        of_state = [event for event in events if event.phase == state]
        chunks = sorted({event.details.get("chunk") or 0 for event in of_state})
        for chunk in chunks:
            mine = [each for each in of_state if (each.details.get("chunk") or 0) == chunk]
            own = union((event.start, event.end) for event in mine)
            label = f"decoder {state}" + (f", chunk {chunk}" if len(chunks) > 1 else "")
            shade = shades[min(chunk, len(shades) - 1) if len(chunks) > 1 else 1]
            boxes.append((label, shade, intersection(intervals, own)))
    return boxes
