"""What computes beside each exchange of experts' tokens: pure functions of a rank's node events.

The host enqueues nodes, one after the other, on a stream for computation and one for communication;
a device with streams runs them when what they wait for is done. A node waits for

1. the node before it on its stream, and
2. the node before it of its own pass (a microbatch's forward, or a microbatch's backward), where
   the first of a pass waits for what was enqueued for computation before it. Weights' gradients
   wait for the stream only, and nothing of their pass waits for them.

So an exchange is under way from the end of the node that gives its input, its launch, to the begin
of the node that takes its result, its wait. A computing node is *beside* it if neither waits for
the other, be it over others. That needs the order of the events alone, not their times, so it can
be asked of a run without streams. A pass begins and ends together with the one that it is combined
with, so each combined step is looked at by itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from loongplug.observe.trace_file import TraceEvent

COMMUNICATION: Final = "communication"
# What an exchange is called, by its node's name and direction, in the order of a layer's pass.
EXCHANGES: Final = {
    ("moe_dispatch", "forward"): "dispatch forward",
    ("moe_combine", "forward"): "combine forward",
    ("moe_combine", "backward"): "combine backward",
    ("moe_dispatch", "backward"): "dispatch backward",
}
SECTIONS: Final = ("warm-up", "steady", "cool-down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A schedule node's forward, backward or weights' gradients, as it was enqueued.

    ``layer`` counts from 1; None of the nodes before and behind a chunk's layers.
    """

    name: str
    direction: str  # forward, backward or wgrad
    stream: str
    microbatch: int | None
    chunk: int | None
    layer: int | None

    @property
    def forward(self) -> bool:
        """Whether it is of the forward's pass."""
        return self.direction == "forward"

    @property
    def computes(self) -> bool:
        """Whether it is enqueued for computation."""
        return self.stream != COMMUNICATION

    def label(self) -> str:
        """Name and direction."""
        return EXCHANGES.get((self.name, self.direction), f"{self.name} {self.direction}")


@dataclass(frozen=True, kw_only=True)
class CombinedStep:
    """The nodes of one call of the combined schedule on one rank, as they were enqueued."""

    section: str  # one of SECTIONS
    nodes: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True)
class TracedExchange:
    """A dispatch or a combine, and what computes beside it, as it was enqueued."""

    node: Node
    section: str
    beside: tuple[Node, ...]

    @property
    def covered(self) -> bool:
        """Whether the other pass computes beside it: a backward beside a forward's, or so."""
        return any(other.forward != self.node.forward for other in self.beside)


def combined_steps(events: Iterable[TraceEvent]) -> Iterator[CombinedStep]:
    """A rank's combined steps, of its events in the order in which they were written.

    Both passes together are ``steady``; a forward alone is ``warm-up``, a backward ``cool-down``.
    """
    nodes: list[Node] = []
    for event in events:
        if event.phase == "node":
            nodes.append(_node(event))
        elif event.phase == "forward_backward":
            passes = {node.forward for node in nodes}
            section = "steady" if len(passes) == 2 else "warm-up" if True in passes else "cool-down"
            yield CombinedStep(section=section, nodes=tuple(nodes))
            nodes = []


def _node(event: TraceEvent) -> Node:
    places = {key: event.details.get(key) for key in ("microbatch", "chunk", "layer")}
    direction, stream = event.details["direction"], event.details["stream"]
    return Node(name=event.name, direction=direction, stream=stream, **places)


def waits(nodes: Sequence[Node]) -> list[set[int]]:
    """By node, the places of those that it waits for directly."""
    on_stream: dict[bool, int] = {}
    of_pass: dict[bool, int] = {}
    result = []
    for place, node in enumerate(nodes):
        before = {on_stream.get(node.computes)}
        if node.direction != "wgrad":
            before.add(of_pass.get(node.forward, on_stream.get(True)))
            of_pass[node.forward] = place
        on_stream[node.computes] = place
        result.append({each for each in before if each is not None})
    return result


def exchanges(step: CombinedStep) -> list[TracedExchange]:
    """Every exchange of a combined step, in the order in which they were enqueued."""
    before: list[int] = []  # by node a bit for each that it waits for, be it over others
    for direct in waits(step.nodes):
        bits = 0
        for place in direct:
            bits |= before[place] | 1 << place
        before.append(bits)
    found = []
    for place, node in enumerate(step.nodes):
        if (node.name, node.direction) not in EXCHANGES:
            continue
        beside = tuple(
            other
            for at, other in enumerate(step.nodes)
            if other.computes and not (before[place] >> at & 1 or before[at] >> place & 1)
        )
        found.append(TracedExchange(node=node, section=step.section, beside=beside))
    return found


def slots(nodes: Sequence[Node]) -> list[int]:
    """When each node would run if all took equally long: a whole number from 0."""
    result: list[int] = []
    for direct in waits(nodes):
        result.append(max((result[place] + 1 for place in direct), default=0))
    return result
