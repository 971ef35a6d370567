"""Steps for plans of full separation, and what the clock says of them."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from loongplug.hetero.balance import balanced, in_passes
from loongplug.hetero.bubble_drafts import streamed
from loongplug.hetero.operations import EncoderWork
from loongplug.hetero.step_programs import (
    EncoderPlan,
    Name,
    PassCosts,
    PieceCost,
    Step,
    plan_programs,
    separated_time,
)
from loongplug.simulate.clock import run
from loongplug.simulate.order import Deadlock

FORWARD = 2016  # of a microbatch on a stage; shares of 10 to 50 % in up to 8 pieces are integers


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
        group=stages,
        forward=(FORWARD // chunks,) * (stages * chunks),
        backward=(2 * FORWARD // chunks,) * (stages * chunks),
        encoder=PassCosts(trains=trains),
    )


def busiest(step: Step) -> int:
    """What each replica's ranks work where all have the same: no step is shorter."""
    decoding = sum(step.decoding[stage] for stage in step.replicas)
    encoding = sum(step.encoding(*name) for name in step.names)
    return -(-(decoding + encoding) // len(step.replicas))


def separated(step: Step) -> EncoderPlan:
    """All pieces before the decoder's schedule, all backwards behind it; balanced by cost."""
    owners = balanced([step.encoding(*name) for name in step.names], len(step.replicas))
    owned: list[list[Name]] = [[] for _ in step.replicas]
    for owner, name in zip(owners, step.names, strict=True):
        owned[owner].append(name)
    plan = []
    for names, stage in zip(owned, step.replicas, strict=True):
        costs = [step.pieces[unit][piece].forward for unit, piece in names]
        passes = in_passes(names, costs, most=step.encoder.joined)
        work = [EncoderWork(0, True, each) for each in passes]
        behind = [EncoderWork(len(step.passes[stage]), False, each) for each in passes]
        plan.append((*work, *(behind if step.encoder.trains else ())))
    return tuple(plan)


def separated_end(step: Step) -> int:
    """When such a step ends, in which all wait for all before and behind the schedule."""
    passes = [[one.pieces for one in work if one.forward] for work in separated(step)]
    return separated_time(step, passes)


def filled(step: Step) -> EncoderPlan | None:
    """The plan of a step that may stream."""
    return streamed(step, otherwise=separated_end(step))


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
    programs = plan_programs(step, plan)
    try:
        found = run(programs)
    except Deadlock:
        return None
    names = ((each.stream, each.which) for each in programs.messages)
    came: dict[Any, Any] = dict(zip(names, found.came, strict=True))
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
        group=stages,
        forward=tuple(draw(times)),
        backward=tuple(draw(times)),
        encoder=PassCosts(
            trains=draw(st.booleans()),
            each=PieceCost(draw(st.integers(0, 20)), draw(st.integers(0, 40))),
            joined=draw(st.sampled_from([0, 60, 10_000])),
        ),
    )
