"""What a rank's time went to: pure functions of its events.

At each moment of a window a rank is in one state, the first of ``STATES`` that holds
(docs/traces.md). The bubble is what is not computing: data, exchange, waiting and idle.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loongplug.observe.trace_file import TraceEvent

Interval = tuple[int, int]  # from, to; never empty within a list that functions here give

_MODEL: Final = (
    *("encoder_backward", "encoder_forward", "backward", "forward", "forward_backward"),
)
_UPDATE: Final = ("optimizer", "gradients")
COMPUTING: Final = (*_MODEL, *_UPDATE)
TRANSFERS: Final = ("p2p", "collective", "wait")
STATES: Final = ("data", "exchange", *_MODEL, "waiting", *_UPDATE, "idle")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, apart from each other and in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The moments that are in both; each is disjoint and in order."""
    result: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            result.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The moments of ``first`` that are not in ``second``; each is disjoint and in order."""
    if not first:
        return []
    start, end = first[0][0], first[-1][1]
    edges = [start, *(edge for interval in second for edge in interval), end]
    gaps = [(edges[at], edges[at + 1]) for at in range(0, len(edges), 2)]
    return intersection(first, [(a, b) for a, b in gaps if a < b])


def length(intervals: Iterable[Interval]) -> int:
    """The sum of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def states(window: Interval, events: Iterable[TraceEvent]) -> dict[str, list[Interval]]:
    """When within ``window`` the rank was in each of ``STATES``; together they fill it."""
    by_state: dict[str, list[Interval]] = {state: [] for state in STATES}
    for event in events:
        state = "waiting" if event.phase in TRANSFERS else event.phase
        if state in by_state:
            by_state[state].append((event.start, event.end))
    left = union([window])
    result: dict[str, list[Interval]] = {}
    for state in STATES[:-1]:
        result[state] = intersection(left, union(by_state[state]))
        left = difference(left, result[state])
    result["idle"] = left
    return result


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Nanoseconds of a window by state, and how much of the computing was within collectives."""

    window: Interval
    by_state: Mapping[str, int]
    computing_in_transfers: int

    @property
    def whole(self) -> int:
        """The length of the window."""
        return self.window[1] - self.window[0]

    @property
    def bubble(self) -> float:
        """The share of the window that is not computing; 0 of an empty window."""
        computing = sum(self.by_state[state] for state in COMPUTING)
        return (self.whole - computing) / self.whole if self.whole else 0.0


def shares(window: Interval, events: Sequence[TraceEvent]) -> Shares:
    """Measure one rank's window."""
    found = states(window, events)
    computing = union(interval for state in COMPUTING for interval in found[state])
    transfers = union(
        (event.start, event.end)
        for event in events
        if event.phase in TRANSFERS or event.phase == "exchange"
    )
    return Shares(
        window=window,
        by_state={state: length(intervals) for state, intervals in found.items()},
        computing_in_transfers=length(intersection(computing, transfers)),
    )


def sections(step: Interval, events: Sequence[TraceEvent]) -> dict[str, Interval]:
    """One rank's step, cut where the pipeline's schedule turns; a section may be empty.

    A combined step is of the microbatches that it tells.
    """
    backwards = [e for e in events if e.phase == "backward" or "backward_microbatch" in e.details]
    combined = [e for e in events if e.phase == "forward_backward" and "microbatch" in e.details]
    forwards = [*(e for e in events if e.phase == "forward"), *combined]
    if not backwards or not forwards:
        return {"step": step}
    first = min(event.start for event in backwards)
    turn = max(first, *(event.end for event in forwards))
    last = max(turn, *(event.end for event in backwards))
    return {
        "warm-up": (step[0], first),
        "steady": (first, turn),
        "cool-down": (turn, last),
        "update": (last, step[1]),
    }
