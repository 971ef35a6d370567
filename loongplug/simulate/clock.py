"""The clock of a step: when each rank does what, how long it is idle, and what decides. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loongplug.observe.trace_file import RankTrace, TraceEvent
from loongplug.simulate.order import BEGIN, Order, order
from loongplug.simulate.programs import Programs, Time, Work


class TimedWork(NamedTuple):
    """A work of a rank on the clock; ``act`` is its number among the rank's acts."""

    rank: int
    act: int
    begin: Time
    end: Time


@dataclass(frozen=True, kw_only=True)
class Run:
    """A step on the clock.

    By rank: when it ``ends``, what its work takes, the bytes that it holds at most, and its work.
    ``critical`` is work that each begins when what it waits for has come, up to the step's end.
    ``came`` is when each message was there, None for one that was not sent.
    """

    ends: tuple[Time, ...]
    busy: tuple[Time, ...]
    held: tuple[int, ...]
    spans: tuple[tuple[TimedWork, ...], ...]
    critical: tuple[TimedWork, ...]
    came: tuple[Time | None, ...]

    @property
    def step(self) -> Time:
        """When the last rank is through."""
        return max(self.ends)

    @property
    def idle(self) -> tuple[Time, ...]:
        """What is left of the step on each rank beside its work."""
        return tuple(self.step - each for each in self.busy)


def run(programs: Programs) -> Run:
    """A step on the clock.

    Raises:
        Deadlock: ranks wait for one another, or for what nobody does.
    """
    found = order(programs)
    return _read(found, programs, *_times(found))


def step_time(programs: Programs) -> Time:
    """How long a step takes, and nothing else of it. Raises as :func:`run`."""
    found = order(programs)
    _, ends = _times(found)
    return max(ends[node] for nodes in found.last for node in nodes)


def replay(order: Order, takes: NDArray[Any]) -> NDArray[Any]:
    """How long a step takes with each of K costs of its works, [works, K] to [K].

    Works are those of the first rank in its order, then of the next one. Messages and meetings
    take what they took.
    """
    rows = {node: row for row, node in enumerate(sorted(order.works, key=order.works.__getitem__))}
    assert len(takes) == len(rows), f"{len(takes)} costs of {len(rows)} works"
    ends: list[NDArray[Any]] = []
    for node, before in enumerate(order.before):
        begin = reduce(np.maximum, [ends[each] for each in before] or [np.zeros_like(takes[0])])
        ends.append(begin + (takes[rows[node]] if node in rows else order.takes[node]))
    last = [ends[node] for nodes in order.last for node in nodes]
    found: NDArray[Any] = np.max(last, axis=0)
    return found


def run_shared(programs: Programs, *, cores: int) -> Run:
    """A step whose ranks compute on so many ``cores``, as on a CPU.

    A rank uses one while it computes; of more ranks than cores, all that compute have equal parts.
    Messages and meetings take none. ``busy`` stays what work takes by itself.

    Raises:
        Deadlock: ranks wait for one another, or for what nobody does.
    """
    assert cores > 0, cores
    found = order(programs)
    count = len(found.takes)
    begins: list[Time] = [0] * count
    ends: list[Time] = [0] * count
    behind: list[list[int]] = [[] for _ in range(count)]
    for node, before in enumerate(found.before):
        for each in before:
            behind[each].append(node)
    missing = [len(before) for before in found.before]
    computing: list[tuple[float, int]] = []  # by how much each that computes has done by then
    sent: list[tuple[float, int]] = [(0.0, BEGIN)]  # by when it is there
    now = done = 0.0  # the time, and what a rank would have done that computed all the time
    while computing or sent:
        rate = min(1.0, cores / len(computing)) if computing else 1.0
        works = now + (computing[0][0] - done) / rate if computing else float("inf")
        if sent and sent[0][0] <= works:
            then, node = heappop(sent)
        else:
            then, node = works, heappop(computing)[1]
        done += (then - now) * rate
        now = then
        ends[node] = now
        for each in behind[node]:
            missing[each] -= 1
            if not missing[each]:
                begins[each] = now
                if each in found.works:
                    heappush(computing, (done + found.takes[each], each))
                else:
                    heappush(sent, (now + found.takes[each], each))
    return _read(found, programs, begins, ends)


def _times(order: Order) -> tuple[list[Time], list[Time]]:
    """When each node of a step begins, and when it ends."""
    begins: list[Time] = []
    ends: list[Time] = []
    for before, takes in zip(order.before, order.takes, strict=True):
        if len(before) == 1:  # most are, and this is faster
            begin = ends[before[0]]
        else:
            begin = max((ends[each] for each in before), default=0)
        begins.append(begin)
        ends.append(begin + takes)
    return begins, ends


def _read(order: Order, programs: Programs, begins: Sequence[Time], ends: Sequence[Time]) -> Run:
    """The run of a step whose nodes begin and end then."""
    spans: list[list[TimedWork]] = [[] for _ in programs.ranks]
    busy: list[Time] = [0 for _ in programs.ranks]
    of_node = {}
    for node, (rank, act) in order.works.items():
        of_node[node] = TimedWork(rank, act, begins[node], ends[node])
        spans[rank].append(of_node[node])
        busy[rank] += order.takes[node]
    last = [max(nodes, key=ends.__getitem__) for nodes in order.last]
    critical = []
    node = max(last, key=ends.__getitem__)
    while node != BEGIN:
        if node in of_node:
            critical.append(of_node[node])
        node = max(order.before[node], key=ends.__getitem__)
    return Run(
        ends=tuple(ends[node] for node in last),
        busy=tuple(busy),
        held=programs.held(),
        spans=tuple(map(tuple, spans)),
        critical=tuple(reversed(critical)),
        came=tuple(None if node is None else ends[node] for node in order.came),
    )


def traces(run: Run, programs: Programs, *, nanoseconds: float = 1.0) -> list[RankTrace]:
    """Traces of all ranks as a run has them; a unit of the clock is so many ``nanoseconds``."""

    def at(time: Time) -> int:
        return round(time * nanoseconds)

    def events(rank: int) -> Iterator[TraceEvent]:
        yield TraceEvent(phase="step", name="step", start=0, end=at(run.step), step=1, details={})
        for span in run.spans[rank]:
            work = programs.ranks[rank][span.act]
            assert isinstance(work, Work)
            label = work.label
            details = {"microbatch": label.microbatch, "chunk": label.chunk}
            yield TraceEvent(
                phase=label.phase,
                name=label.phase.replace("_", " "),
                start=at(span.begin),
                end=at(span.end),
                step=1,
                details={key: value for key, value in details.items() if value is not None},
            )

    return [
        RankTrace(
            rank=rank,
            world_size=len(programs.ranks),
            device="simulated",
            place=programs.places[rank] if programs.places else {},
            events=tuple(events(rank)),
            cut_off=False,
        )
        for rank in range(len(programs.ranks))
    ]
