"""Steps as programs of the clock: of a decoder's stages, and of full separation. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from loongplug.hetero.encoder_steps import EncoderWork
from loongplug.hetero.recorded_schedule import Pipeline, Posted, StageEnd, Turn, Waited, calls
from loongplug.hetero.step_costs import DecoderPass, EncoderPlan, Name, Step
from loongplug.simulate.clock import step_time
from loongplug.simulate.order import Deadlock
from loongplug.simulate.programs import Act, Build, End, Meet, Post, Programs, Wait, Work


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
    """When a step ends that does not stream, by what is sent: between stages a send waits.

    All encode, all exchange features, Megatron's schedule runs, and gradients go back when the
    first stage is through. ``passes`` are each replica's through the encoder, there and back. Those
    of the decoder go on beside what virtual stages send.
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
