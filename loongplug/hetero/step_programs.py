"""Steps as programs of the clock: of a decoder's stages, and of full separation. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from loongplug.hetero.encoder_steps import EncoderWork
from loongplug.hetero.pass_order import Pipeline, Turn
from loongplug.hetero.recorded_schedule import Posted, StageEnd, Waited, calls
from loongplug.hetero.step_costs import DecoderPass, EncoderPlan, Name, Step
from loongplug.simulate.clock import run, step_time
from loongplug.simulate.order import Deadlock, order
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
    counts: dict[StageEnd, int] = {}
    posted: dict[tuple[int, StageEnd], End] = {}

    def end(way: StageEnd) -> End:
        number = counts[way] = counts.get(way, -1) + 1
        other = ranks[(pipeline.stage + (1 if way.to_next else -1)) % pipeline.stages]
        source, target = (rank, other) if way.sends else (other, rank)
        kind = "activations" if way.forward else "gradients"
        return build.message((kind, source, target), number, eager=eager), way.sends

    for place, call in enumerate(calls(pipeline, microbatches, beside_sends=beside_sends)):
        match call:
            case Posted(ways=ways):
                ends = tuple(map(end, ways))
                posted |= {(place, way): each for way, each in zip(ways, ends, strict=True)}
                yield Post(ends)
            case Waited(posted=at, ways=ways):
                yield Wait(tuple(posted[at, way] for way in ways))
            case Turn():
                yield from work(call)


class PlanClock:
    """The clock of one step's plans that stream. What is sent arrives at once.

    Nobody waits for a send. A replica's ranks are one here, and replicas of one stage do each of
    its passes together.
    """

    def __init__(self, step: Step) -> None:
        self.step, build = step, Build()
        self._features = {name: build.message("features", name) for name in step.names}
        self._made = {
            one: build.message(one[:2], one.microbatch) for own in step.passes for one in own
        }
        self._build = build
        self._passes = [
            [[*self._decoding(stage, one)] for one in passes]
            for stage, passes in enumerate(step.passes)
        ]
        self._works: dict[tuple[bool, tuple[Name, ...]], tuple[Act, Act]] = {}
        self._empty = build.programs(())

    def time(self, plan: EncoderPlan) -> int | None:
        """When the step ends; None where ranks wait for one another for ever."""
        try:
            return int(step_time(self.programs(plan)))
        except Deadlock:
            return None

    def programs(self, plan: EncoderPlan) -> Programs:
        """Of each replica."""
        replicas = range(len(self.step.replicas))
        return replace(self._empty, ranks=tuple(self._acts(each, plan) for each in replicas))

    def _acts(self, replica: int, plan: EncoderPlan) -> tuple[Act, ...]:
        """The passes of the replica's stage with its own work between them."""
        stage, work = self.step.replicas[replica], plan[replica]
        passes = self._passes[stage]
        if replica != self.step.lanes[stage][0]:  # one of them sends for all
            passes = [each[:-1] for each in passes]
        found: list[Act] = []
        done = 0
        for one in work:
            for each in passes[done : one.before]:
                found += each
            done = max(done, one.before)
            found += self._encoding(one)
        for each in passes[done:]:
            found += each
        return tuple(found)

    def _encoding(self, one: EncoderWork[Name]) -> tuple[Act, Act]:
        """Plans of one step have many works in common."""
        key = one.forward, one.pieces
        if key not in self._works:
            work = Work(self.step.encoder_pass(one.pieces, forward=one.forward))
            if one.forward:
                ends = tuple((self._features[name], True) for name in one.pieces)
                self._works[key] = work, Post(ends)
            else:  # gradients come in the order of microbatches
                self._works[key] = self._wait(DecoderPass(False, 0, one.pieces[-1][0])), work
        return self._works[key]

    def _decoding(self, stage: int, one: DecoderPass) -> Iterator[Act]:
        step, before = self.step, self.step.before(one)
        if before is None:
            pieces = range(len(step.pieces[one.microbatch]))
            yield Wait(tuple((self._features[one.microbatch, each], False) for each in pieces))
        elif before[1:] != one[1:]:  # else the rank has just done it
            yield self._wait(before)
        if len(step.lanes[stage]) > 1:
            yield Meet(self._build.group(step.lanes[stage]))
        yield Work(step.cost(one))
        yield Post(((self._made[one], True),))

    def _wait(self, one: DecoderPass) -> Wait:
        return Wait(((self._made[one], False),))


def decoder_alone(step: Step) -> dict[DecoderPass, int]:
    """When each pass of a step without encoders begins, in an order of what waits for what."""
    programs = PlanClock(replace(step, pieces=((),) * len(step.pieces))).programs(
        ((),) * len(step.replicas)
    )
    begins = {each[:2]: int(each.begin) for spans in run(programs).spans for each in spans}
    passes = {lanes[0]: iter(own) for lanes, own in zip(step.lanes, step.passes, strict=True)}
    return {
        next(passes[rank]): begins[rank, act]
        for rank, act in order(programs).works.values()
        if rank in passes
    }


def separated_time(step: Step, passes: Sequence[Sequence[tuple[Name, ...]]]) -> int:
    """When a step ends that does not stream, by what is sent: between stages a send waits.

    All encode, all exchange features, Megatron's schedule runs, and gradients go back when the
    first stage is through. ``passes`` are each replica's through the encoder, there and back. Those
    of the decoder go on beside what virtual stages send.
    """
    build, stages = Build(), len(step.passes)
    chunks, everyone = len(step.forward) // stages, range(len(step.replicas))
    encoded = build.group(everyone)
    through = build.message("gradients", "all")

    def encoding(replica: int, *, forward: bool) -> Iterator[Act]:
        for names in passes[replica]:
            yield Work(step.encoder_pass(names, forward=forward))

    def acts(replica: int) -> Iterator[Act]:
        stage = step.replicas[replica]
        lane = step.lanes[stage].index(replica)
        together = build.group(step.lanes[stage])

        def work(turn: Turn) -> Iterator[Act]:
            yield Meet(together)
            for one, costs in ((turn.forward, step.forward), (turn.backward, step.backward)):
                if one is not None:
                    yield Work(costs[one.chunk * stages + stage])

        yield from encoding(replica, forward=True)
        yield Meet(encoded)
        yield from stage_acts(
            build,
            Pipeline(stages=stages, stage=stage, chunks=chunks, group=step.group),
            len(step.pieces),
            ranks=[lanes[lane] for lanes in step.lanes],
            work=work,
            beside_sends=chunks > 1,
        )
        if replica == step.lanes[0][0]:
            yield Post(((through, True),))
        yield Wait(((through, False),))
        if step.encoder.trains:
            yield from encoding(replica, forward=False)

    return int(step_time(build.programs([[*acts(replica)] for replica in everyone])))
