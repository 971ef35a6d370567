"""Steps for plans of full separation, and all that their ranks send and receive."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from simulated import Exchange, Move, Rank

from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.step_costs import (
    DecoderPass,
    EncoderPlan,
    EncoderWork,
    PassCosts,
    PieceCost,
    Step,
    decoder_passes,
)
from loongplug.hetero.step_programs import PlanClock
from loongplug.simulate.clock import run
from loongplug.simulate.order import Deadlock

FORWARD = 2016  # of a microbatch on a stage; shares of 10 to 50 % in up to 8 pieces are integers


def passes(
    stages: int, microbatches: int, *, chunks: int = 1
) -> tuple[tuple[DecoderPass, ...], ...]:
    """Megatron's order on each stage."""
    pipelines = (
        Pipeline(stages=stages, stage=stage, chunks=chunks, group=stages) for stage in range(stages)
    )
    return tuple(decoder_passes(each, microbatches) for each in pipelines)


def even(
    stages: int,
    *,
    percent: int,
    microbatches: int = 16,
    count: int = 4,
    chunks: int = 1,
    lanes: int = 1,
    trains: bool = True,
) -> Step:
    """All alike, backward twice the forward; encoders have ``percent`` of all work.

    Each microbatch has ``count`` pieces, each stage ``lanes`` encoder replicas. Of a frozen encoder
    the backward is left out of that.
    """
    encoding = FORWARD * stages * lanes * percent // (100 - percent)
    piece = PieceCost(encoding // count, 2 * encoding // count)
    return Step(
        pieces=((piece,) * count,) * microbatches,
        replicas=tuple(stage for stage in range(stages) for _ in range(lanes)),
        passes=passes(stages, microbatches, chunks=chunks),
        forward=(FORWARD // chunks,) * (stages * chunks),
        backward=(2 * FORWARD // chunks,) * (stages * chunks),
        encoder=PassCosts(trains=trains),
    )


def busiest(step: Step) -> int:
    """What each replica's ranks work where all have the same: no step is shorter."""
    decoding = sum(step.decoding[stage] for stage in step.replicas)
    encoding = sum(step.encoding(*name) for name in step.names)
    return -(-(decoding + encoding) // len(step.replicas))


@dataclass(frozen=True, kw_only=True)
class Times:
    """A step on the clock: ``idle`` by replica, and when each piece's features are there.

    ``used`` is when the decoder is through with a microbatch's.
    """

    step: int
    idle: tuple[int, ...]
    encoded: dict[tuple[int, int], int]
    used: dict[int, int]

    def features_held(self) -> int:
        """How many pieces' features there are at most at one time, wherever they lie."""
        moments = [(at, 1) for at in self.encoded.values()]
        moments += [(self.used[microbatch], -1) for microbatch, _ in self.encoded]
        now = most = 0
        for _, change in sorted(moments):
            now += change
            most = max(most, now)
        return most


def simulate(step: Step, plan: EncoderPlan) -> Times | None:
    """None where ranks wait for one another for ever."""
    programs = PlanClock(step).programs(plan)
    try:
        found = run(programs)
    except Deadlock:
        return None
    came: dict[Any, Any] = dict(zip(programs.messages.names, found.came, strict=True))
    return Times(
        step=found.step,
        idle=found.idle,
        encoded={name: came["features", name] for name in step.names},
        used={number: came[(True, 0), number] for number in range(len(step.pieces))},
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any that there can be, with costs that differ."""
    stages, lanes = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    chunks = draw(st.integers(1, 2)) if stages > 1 else 1
    microbatches = draw(st.integers(1, 7))
    if chunks > 1:
        microbatches = stages * draw(st.integers(1, 3))
    costs = st.builds(PieceCost, st.integers(0, 60), st.integers(0, 120))
    pieces = tuple(tuple(draw(st.lists(costs, max_size=4))) for _ in range(microbatches))
    times = st.lists(st.integers(1, 30), min_size=stages * chunks, max_size=stages * chunks)
    return Step(
        pieces=pieces,
        replicas=tuple(stage for stage in range(stages) for _ in range(lanes)),
        passes=passes(stages, microbatches, chunks=chunks),
        forward=tuple(draw(times)),
        backward=tuple(draw(times)),
        encoder=PassCosts(
            trains=draw(st.booleans()),
            each=PieceCost(draw(st.integers(0, 20)), draw(st.integers(0, 40))),
            joined=draw(st.sampled_from([0, 60, 10_000])),
        ),
    )


@dataclass
class Traffic:
    """What ranks send and receive: in which order, and the programs of all ranks.

    ``pieces`` has, by what they are, source, target and end, which pieces pass in turn. A replica
    is one rank; those of one stage are in one tensor parallel group, which does a pass together. So
    do those of other model replicas, by ``name``, that this one is ``tied`` to, as experts tie
    them.
    """

    step: Step
    plan: EncoderPlan
    name: str = "replica"
    tied: tuple[str, ...] = ()
    programs: dict[Rank, list[Exchange]] = field(default_factory=dict)
    pieces: defaultdict[tuple[str, int, int, bool], list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def __post_init__(self) -> None:
        self._owners = {
            name: replica
            for replica, work in enumerate(self.plan.work)
            for one in work
            for name in one.pieces
        }
        for replica in range(len(self.step.replicas)):
            self.programs[self.name, replica] = self._program(replica)

    def _program(self, replica: int) -> list[Exchange]:
        stage = self.step.replicas[replica]
        program: list[Exchange] = []
        work = list(self.plan.work[replica])
        for number, one in enumerate(self.step.passes[stage]):
            while work and work[0].before <= number:
                program += self._encoder(replica, work.pop(0))
            program += self._decoder(replica, one)
        return program + [each for one in work for each in self._encoder(replica, one)]

    def _encoder(self, replica: int, one: EncoderWork) -> list[Exchange]:
        """A pass sends the features of its pieces in turn, and takes their gradients in turn."""
        lanes = self.step.lanes[0]
        if one.forward:
            return [
                self._pieces("features", replica, [(each, name) for each in lanes])
                for name in one.pieces
            ]
        return [
            self._pieces("gradients", replica, [(lanes[0], name)], sends=False)
            for name in one.pieces
        ]

    def _decoder(self, replica: int, one: DecoderPass) -> list[Exchange]:
        lanes = self.step.lanes[self.step.replicas[replica]]
        others = [each for each in lanes if each != replica]
        ready = tuple(self._move("ready", replica, other) for other in others)
        all_ready = tuple(self._move("ready", other, replica, sends=False) for other in others)
        takes: list[Move] = []
        gives: list[Move] = []
        before, behind = self.step.before(one), self.step.behind(one)
        if before is not None and (other := self._peer(replica, before)) != replica:
            takes.append(
                self._move(f"{before.forward} {before.place}", other, replica, sends=False)
            )
        if behind is not None and (other := self._peer(replica, behind)) != replica:
            gives.append(self._move(f"{one.forward} {one.place}", replica, other))
        names = [(one.microbatch, n) for n in range(len(self.step.pieces[one.microbatch]))]
        owned = [(self._owners[name], name) for name in names]
        if one[:2] == (True, 0):
            takes += self._pieces("features", replica, owned, sends=False)
        elif one[:2] == (False, 0) and replica == self.step.lanes[0][0]:
            gives += self._pieces("gradients", replica, owned if self.step.encoder.trains else [])
        here, elsewhere = (self.name, replica), [(name, replica) for name in self.tied]
        ties = (
            tuple(Move(sends=True, what="tie", source=here, target=each) for each in elsewhere),
            tuple(Move(sends=False, what="tie", source=each, target=here) for each in elsewhere),
        )
        return [tuple(takes), ready, all_ready, *ties, tuple(gives)]

    def _peer(self, replica: int, one: DecoderPass) -> int:
        """Of its place in the tensor parallel group, on the stage of a pass."""
        step = self.step
        place = step.lanes[step.replicas[replica]].index(replica)
        return step.lanes[one.place % len(step.passes)][place]

    def _pieces(
        self, what: str, rank: int, others: list[tuple[int, tuple[int, int]]], *, sends: bool = True
    ) -> Exchange:
        moves = []
        for other, name in others:
            source, target = (rank, other) if sends else (other, rank)
            self.pieces[what, source, target, sends].append(name)
            moves.append(self._move(what, source, target, sends=sends))
        return tuple(moves)

    def _move(self, what: str, source: int, target: int, *, sends: bool = True) -> Move:
        return Move(sends=sends, source=(self.name, source), target=(self.name, target), what=what)
