"""Ranks of pipelines that lead into one another, without tensors: who waits for whom.

A rank's program is a list of exchanges, one behind the other. What is in an exchange sets out
together, and the rank goes on when all of it is done: a receive when it was sent, and a send at
once, or, where it waits, when somebody receives it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loongplug.hetero.pass_order import Pass, Pipeline, Turn, turns
from loongplug.simulate.order import Deadlock, order
from loongplug.simulate.programs import Act, Build, End, Post, Wait


@dataclass(frozen=True, kw_only=True)
class GraphModule:
    """A module's pipeline; ``into`` is what its last stage sends to, None for the decoder alone."""

    name: str
    stages: int
    into: str | None = None


def distances(modules: Sequence[GraphModule]) -> dict["Rank", int]:
    """Of each module's each stage, how many stages lie behind it on the way to the decoder's last.

    With so many forwards before its first backward, no rank waits for a gradient that its own next
    output is needed for.
    """
    graph = {each.name: each for each in modules}

    def behind(module: GraphModule) -> int:
        return 0 if module.into is None else graph[module.into].stages + behind(graph[module.into])

    return {
        (module.name, stage): behind(module) + module.stages - 1 - stage
        for module in modules
        for stage in range(module.stages)
    }


Rank = tuple[str, int]  # a module and one of its stages
Counts = Mapping[Rank, int]  # warm-up forwards


@dataclass(frozen=True, kw_only=True)
class Move:
    """One end of a message. ``what`` tells apart those that may overtake one another.

    A send that ``waits`` does so for its receive, or for that of the message so many ``before``.
    """

    sends: bool
    source: Rank
    target: Rank
    what: str = ""
    waits: bool = False
    before: int = 0

    @property
    def message(self) -> tuple[Rank, Rank, str]:
        """What both ends have in common; the n-th send is received by the n-th receive."""
        return self.source, self.target, self.what


Exchange = tuple[Move, ...]


def calls(*, warmup: int, microbatches: int) -> Iterator[str]:
    """What Megatron's 1F1B asks of its communicator, in order; a test compares."""
    steady = microbatches - warmup
    for _ in range(warmup):
        yield "recv_forward"
        yield "send_forward"
    if steady:
        yield "recv_forward"
    for number in range(steady):
        yield "send_forward_recv_backward"
        yield "send_backward" if number == steady - 1 else "send_backward_recv_forward"
    for _ in range(warmup):
        yield "recv_backward"
        yield "send_backward"


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Pipelines that lead into one another; every stage one rank.

    Within a pipeline sends wait, as those of gloo and NCCL do; with ``edges_wait`` those from one
    module to another do too. With ``shapes`` a message with the shape goes ahead of each that
    waits. Upstream has both.
    """

    modules: Sequence[GraphModule]
    edges_wait: bool = False
    shapes: bool = False

    @property
    def ranks(self) -> list[Rank]:
        return [(each.name, stage) for each in self.modules for stage in range(each.stages)]

    def behind(self, rank: Rank) -> list[Rank]:
        """Those that it sends forward to: one, or none at the sink."""
        module, stage = self._module(rank), rank[1]
        if stage < module.stages - 1:
            return [(module.name, stage + 1)]
        return [] if module.into is None else [(module.into, 0)]

    def before(self, rank: Rank) -> list[Rank]:
        """Those that send forward to it."""
        return [each for each in self.ranks if rank in self.behind(each)]

    def exchanges(self, rank: Rank, call: str) -> Iterator[Exchange]:
        """What a rank does in a call, in parts that wait one for another."""
        for others, sends, receives in (
            (self.behind(rank), "send_forward" in call, "recv_backward" in call),
            (self.before(rank), "send_backward" in call, "recv_forward" in call),
        ):
            for other in others:
                yield from self._with(rank, other, sends=sends, receives=receives)

    def program(self, rank: Rank, *, warmup: int, microbatches: int) -> list[Exchange]:
        """All that a rank does in a step of 1F1B."""
        asked = calls(warmup=min(warmup, microbatches), microbatches=microbatches)
        return [exchange for call in asked for exchange in self.exchanges(rank, call)]

    def finishes(self, counts: Counts, *, microbatches: int) -> bool:
        """Whether a step with these warm-ups comes to its end."""
        return finish(
            {
                rank: self.program(rank, warmup=counts[rank], microbatches=microbatches)
                for rank in self.ranks
            }
        )

    def posted_ahead(
        self, rank: Rank, program: Sequence[Exchange], *, ahead: int
    ) -> list[Exchange]:
        """``program`` of a rank where receives between modules, posted early, hold up what follows.

        What encoders send comes to the rank so many units ``ahead`` of the one that it needs. So it
        is where a GPU has one queue for all of its work: what is given to it behind a second
        receive starts when the first one is done.
        """
        encoders = {each.name for each in self.modules if each.into is not None}
        sources = {each for each in self.before(rank) if each[0] in encoders}
        made = [[move for move in each if not _comes(move, sources)] for each in program]
        places: defaultdict[Rank, list[int]] = defaultdict(list)  # of the receives from a source
        for number, each in enumerate(program):
            for move in each:
                if _comes(move, sources):
                    places[move.source].append(number)
                    early = places[move.source][max(0, len(places[move.source]) - 1 - ahead)]
                    made[early].append(move)
        return [tuple(each) for each in made]

    def _module(self, rank: Rank) -> GraphModule:
        return next(each for each in self.modules if each.name == rank[0])

    def _with(self, rank: Rank, other: Rank, *, sends: bool, receives: bool) -> list[Exchange]:
        """A message to another rank, one from it, or both at once."""
        waits = rank[0] == other[0] or self.edges_wait
        together = []
        if sends:
            together.append(Move(sends=True, source=rank, target=other, waits=waits))
        if receives:
            together.append(Move(sends=False, source=other, target=rank))
        if not together:
            return []
        return [tuple(together)] * (2 if waits and self.shapes else 1)


def _comes(move: Move, sources: set[Rank]) -> bool:
    """Whether it is a receive from one of ``sources``."""
    return not move.sends and move.source in sources


def finish(programs: Mapping[Rank, Sequence[Exchange]]) -> bool:
    """Whether all ranks come to the end of their programs."""
    build = Build()
    try:
        order(build.programs([[*_acts(build, each)] for each in programs.values()]))
    except Deadlock:
        return False
    return True


def _acts(build: Build, program: Sequence[Exchange]) -> Iterator[Act]:
    counts: Counter[tuple[bool, tuple[Rank, Rank, str]]] = Counter()
    for exchange in program:
        posts: list[End] = []
        waits: list[End] = []
        for move in exchange:
            counts[move.sends, move.message] += 1
            number = counts[move.sends, move.message]
            posts.append((build.message(move.message, number, eager=False), move.sends))
            before = number - move.before
            if not move.sends or (move.waits and before > 0):
                waits.append((build.message(move.message, before, eager=False), move.sends))
        yield Post(tuple(posts))
        yield Wait(tuple(waits))


@dataclass(frozen=True, kw_only=True)
class _Link:
    """Another rank, and the names of the messages from and to it."""

    other: Rank
    forward: str
    backward: str

    def end(self, rank: Rank, *, forward: bool, sends: bool) -> Move:
        """``rank``'s own of a message."""
        return Move(
            sends=sends,
            source=rank if sends else self.other,
            target=self.other if sends else rank,
            what=self.forward if forward else self.backward,
        )


def decoder_programs(
    name: str,
    *,
    pipeline: Pipeline,
    microbatches: int,
    sources: Sequence[Rank],
) -> dict[Rank, list[Exchange]]:
    """A decoder's ranks under any schedule of Megatron's, interleaved ones too; no send waits.

    ``pipeline`` is that of any of its stages. ``sources`` are the last stages of the modules that
    lead into it.
    """
    stages, end = pipeline.stages, pipeline.stages * pipeline.chunks - 1

    def links(stage: int, each: Pass) -> tuple[list[_Link], list[_Link]]:
        """Before and behind one of the rank's chunks."""
        place = each.chunk * stages + stage  # on the whole way
        before = [_Link(other=source, forward="", backward="") for source in sources]
        if place:
            other = (name, (place - 1) % stages)
            before = [_Link(other=other, forward=f"F{place}", backward=f"B{place - 1}")]
        other = (name, (place + 1) % stages)
        behind = [_Link(other=other, forward=f"F{place + 1}", backward=f"B{place}")]
        return before, behind if place < end else []

    def work(stage: int, turn: Turn) -> tuple[Exchange, Exchange]:
        """What it needs is there before any of it starts, and leaves when all is done."""
        rank = (name, stage)
        takes: list[Move] = []
        gives: list[Move] = []
        for each, forward in ((turn.forward, True), (turn.backward, False)):
            if each is not None:
                before, behind = links(stage, each)
                first, then = (before, behind) if forward else (behind, before)
                takes += [link.end(rank, forward=forward, sends=False) for link in first]
                gives += [link.end(rank, forward=forward, sends=True) for link in then]
        return tuple(takes), tuple(gives)

    return {
        (name, stage): [
            exchange
            for turn in turns(replace(pipeline, stage=stage), microbatches)
            for exchange in work(stage, turn)
        ]
        for stage in range(stages)
    }
