"""Steps as programs of the clock: of a decoder's stages, and of full separation. Pure.

Costs are integers of one unit, such as counted operations.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from loongplug.hetero.operations import EncoderWork
from loongplug.hetero.recorded_schedule import (
    Pipeline,
    Posted,
    StageEnd,
    Turn,
    Waited,
    calls,
    turns,
)
from loongplug.simulate.clock import step_time
from loongplug.simulate.order import Deadlock
from loongplug.simulate.programs import Act, Build, End, Meet, Post, Programs, Wait, Work


class DecoderPass(NamedTuple):
    """A microbatch's way through one stage or virtual chunk of the decoder.

    ``place`` is where it stands on the microbatch's whole way forward, from 0 on: with several
    chunks to a rank, chunk x stages + stage.
    """

    forward: bool
    place: int
    microbatch: int


def decoder_passes(pipeline: Pipeline, microbatches: int) -> tuple[DecoderPass, ...]:
    """The passes of one stage in a step, in Megatron's order."""
    return tuple(
        DecoderPass(forward, one.chunk * pipeline.stages + pipeline.stage, one.microbatch)
        for turn in turns(pipeline, microbatches)
        for forward, one in ((True, turn.forward), (False, turn.backward))
        if one is not None
    )


class PieceCost(NamedTuple):
    """What one encoder replica takes for a piece; the backward of a frozen encoder takes 0."""

    forward: int
    backward: int


FREE = PieceCost(0, 0)


Name = tuple[int, int]  # of a piece: its microbatch, and its number in it


# What each encoder replica of a model replica does in a step, in its order.
EncoderPlan = tuple[tuple[EncoderWork[Name], ...], ...]


@dataclass(frozen=True, kw_only=True)
class PassCosts:
    """What holds for every pass through the encoder.

    ``trains``: it has a backward. ``each`` is what a pass takes besides its pieces, however many
    these are; pieces go together as long as their forwards take no more than ``joined``.
    """

    trains: bool = True
    each: PieceCost = FREE
    joined: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a model replica, by costs.

    ``pieces`` are of each microbatch, in the order of its rows. ``replicas`` are the stages that
    encoder replicas lie on, at least one each. ``forward`` and ``backward`` are what a microbatch
    takes, by place. Of several chunks, a rank's take ``group`` microbatches each in turn.
    """

    pieces: tuple[tuple[PieceCost, ...], ...]
    replicas: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    group: int
    encoder: PassCosts = PassCosts()

    @cached_property
    def passes(self) -> tuple[tuple[DecoderPass, ...], ...]:
        """The passes of each stage, in Megatron's order."""
        stages = 1 + max(self.replicas)
        first = Pipeline(
            stages=stages, stage=0, chunks=len(self.forward) // stages, group=self.group
        )
        return tuple(
            decoder_passes(replace(first, stage=stage), len(self.pieces)) for stage in range(stages)
        )

    def cost(self, one: DecoderPass) -> int:
        return (self.forward if one.forward else self.backward)[one.place]

    def before(self, one: DecoderPass) -> DecoderPass | None:
        """The pass that this one waits for, beside features; None for the first of all."""
        forward, place, microbatch = one
        if forward:
            return DecoderPass(True, place - 1, microbatch) if place else None
        if place == len(self.forward) - 1:
            return DecoderPass(True, place, microbatch)
        return DecoderPass(False, place + 1, microbatch)

    @cached_property
    def behind(self) -> dict[DecoderPass | None, DecoderPass]:
        """The pass that waits for each, beside an encoder's backward."""
        return {self.before(one): one for passes in self.passes for one in passes}

    def encoding(self, microbatch: int, piece: int) -> int:
        """What a piece takes forward and, where the encoder trains, backward."""
        cost = self.pieces[microbatch][piece]
        return cost.forward + cost.backward if self.encoder.trains else cost.forward

    def encoder_pass(self, names: Iterable[Name], *, forward: bool) -> int:
        way = 0 if forward else 1
        return self.encoder.each[way] + sum(self.pieces[unit][piece][way] for unit, piece in names)

    @cached_property
    def names(self) -> tuple[Name, ...]:
        """All pieces in order, by microbatch and place in it."""
        return tuple(
            (microbatch, piece)
            for microbatch, pieces in enumerate(self.pieces)
            for piece in range(len(pieces))
        )

    @cached_property
    def decoding(self) -> tuple[int, ...]:
        return tuple(sum(map(self.cost, passes)) for passes in self.passes)

    @cached_property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(number for number, at in enumerate(self.replicas) if at == stage)
            for stage in range(len(self.passes))
        )


def stage_acts(
    build: Build,
    pipeline: Pipeline,
    microbatches: int,
    *,
    ranks: Sequence[int],
    work: Callable[[Turn], Iterable[Act]],
    eager: bool = False,
    beside_sends: bool = False,
) -> Iterator[Act]:
    """What a stage does in a step, with ``work`` in the place of its passes.

    ``ranks`` are those of all stages. A send between them waits for its receive, as with gloo and
    NCCL, unless it is ``eager``. ``beside_sends`` is that of :func:`calls`.
    """
    rank = ranks[pipeline.stage]

    def ends(of: Iterable[StageEnd]) -> Iterator[End]:
        for each in of:
            other = ranks[(pipeline.stage + (1 if each.to_next else -1)) % pipeline.stages]
            way = (rank, other) if each.sends else (other, rank)
            stream = ("activations" if each.forward else "gradients", *way)
            yield build.message(stream, each.number, eager=eager), each.sends

    for call in calls(pipeline, microbatches, beside_sends=beside_sends):
        match call:
            case Posted():
                yield Post(tuple(ends(call.ends)))
            case Waited():
                yield Wait(tuple(ends(call.ends)))
            case Turn():
                yield from work(call)


def plan_programs(step: Step, plan: EncoderPlan) -> Programs:
    """A step that streams, by replica, whose ranks are one here. What is sent arrives at once.

    Nobody waits for a send, and replicas of one stage do each of its passes together.
    """
    return _programs_of(step)(plan)


@lru_cache(maxsize=1)  # what plans of one step, tried one behind the other, have in common
def _programs_of(step: Step) -> Callable[[EncoderPlan], Programs]:
    build = Build()

    def done(one: DecoderPass, *, sends: bool = False) -> tuple[End, ...]:
        return ((build.message(one[:2], one.microbatch), sends),)

    def features(names: Iterable[Name], *, sends: bool = False) -> tuple[End, ...]:
        return tuple((build.message("features", name), sends) for name in names)

    def encoding(one: EncoderWork[Name]) -> Iterator[Act]:
        if not one.forward:  # gradients come in the order of microbatches
            yield Wait(done(DecoderPass(False, 0, one.pieces[-1][0])))
        yield Work(step.encoder_pass(one.pieces, forward=one.forward))
        if one.forward:
            yield Post(features(one.pieces, sends=True))

    def decoding(one: DecoderPass, *, sends: bool, lanes: Sequence[int]) -> Iterator[Act]:
        before = step.before(one)
        if before is None:
            own = range(len(step.pieces[one.microbatch]))
            yield Wait(features((one.microbatch, piece) for piece in own))
        elif before[1:] != one[1:]:  # else the rank has just done it
            yield Wait(done(before))
        if len(lanes) > 1:
            yield Meet(build.group(lanes))
        yield Work(step.cost(one))
        if sends:
            yield Post(done(one, sends=True))

    def passes(replica: int) -> list[list[Act]]:
        stage = step.replicas[replica]
        lanes = step.lanes[stage]  # of which the first sends for all
        return [
            [*decoding(one, sends=replica == lanes[0], lanes=lanes)] for one in step.passes[stage]
        ]

    decoder = [*map(passes, range(len(step.replicas)))]

    def acts(replica: int, plan: EncoderPlan) -> Iterator[Act]:
        between = defaultdict[int, list[EncoderWork[Name]]](list)
        for one in plan[replica]:
            between[one.before].append(one)
        for number, each in enumerate([*decoder[replica], []]):
            yield from chain.from_iterable(map(encoding, between[number]))
            yield from each

    return lambda plan: build.programs([[*acts(each, plan)] for each in range(len(decoder))])


def plan_time(step: Step, plan: EncoderPlan) -> int | None:
    """When a step that streams ends; None where ranks wait for one another for ever."""
    try:
        return int(step_time(plan_programs(step, plan)))
    except Deadlock:
        return None


def separated_time(step: Step, passes: Sequence[Sequence[tuple[Name, ...]]]) -> int:
    """When a step ends that does not stream, where a send between stages waits for its receive.

    ``passes`` are each replica's through the encoder, there and back. Those of the decoder go on
    beside what virtual stages send.
    """
    build, stages = Build(), len(step.passes)
    chunks, everyone = len(step.forward) // stages, range(len(step.replicas))
    together = build.group(everyone)

    def encoding(replica: int, *, forward: bool) -> Iterator[Act]:
        for names in passes[replica]:
            yield Work(step.encoder_pass(names, forward=forward))

    def acts(replica: int) -> Iterator[Act]:
        stage = step.replicas[replica]
        lane = step.lanes[stage].index(replica)

        def work(turn: Turn) -> Iterator[Act]:
            yield Meet(build.group(step.lanes[stage]))
            for one, costs in ((turn.forward, step.forward), (turn.backward, step.backward)):
                if one is not None:
                    yield Work(costs[one.chunk * stages + stage])

        yield from encoding(replica, forward=True)
        yield Meet(together)
        yield from stage_acts(
            build,
            Pipeline(stages=stages, stage=stage, chunks=chunks, group=step.group),
            len(step.pieces),
            ranks=[lanes[lane] for lanes in step.lanes],
            work=work,
            beside_sends=chunks > 1,
        )
        yield Meet(together)  # the first stage is through last
        if step.encoder.trains:
            yield from encoding(replica, forward=False)

    return int(step_time(build.programs([[*acts(replica)] for replica in everyone])))
