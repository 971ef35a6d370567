"""A step of a decoder's pipeline, and of encoders' that lead into it, on the clock. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from loongplug.hetero.recorded_schedule import Pass, Pipeline, Turn, forwards_first
from loongplug.hetero.step_programs import stage_acts
from loongplug.simulate import clock
from loongplug.simulate.programs import Act, Build, End, Post, Wait, Work


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """What one microbatch takes on one stage, in any one unit of time; 0 or more."""

    forward: float
    backward: float


def step_time(
    decoder: Sequence[StageTime],
    *,
    microbatches: int,
    encoders: Sequence[Sequence[StageTime]] = (),
    pipeline: Pipeline | None = None,
) -> float:
    """How long a step takes, from the first forward to the last backward, in the unit of the times.

    Every stage has ranks of its own. The ``decoder`` has its passes in Megatron's order: that of
    1F1B, or of ``pipeline``, which is that of any of its stages; the times are those of all virtual
    stages then, in their order. The stages of each of ``encoders`` stand in a row before it. Its
    first stage takes a microbatch from the last stages of all of them, and gives each the gradient.
    An encoder's stage is as far ahead as in a run (:func:`forwards_first`). What is sent arrives at
    once, and nobody waits for who receives it. Backwards that take no time come in their turn, too.

    Of p stages in a row that are equal, m microbatches take (m + p - 1) times forward and backward:
    the bubble is (p - 1) / m of the work.

    >>> stage = StageTime(forward=1, backward=2)
    >>> step_time([stage] * 4, microbatches=8)
    33
    """
    pipeline = pipeline or Pipeline(stages=len(decoder), stage=0, chunks=1, group=len(decoder))
    stages = pipeline.stages
    assert len(decoder) == stages * pipeline.chunks, (len(decoder), pipeline)
    first_ranks = [*accumulate(map(len, encoders), initial=stages)]
    sources = [behind - 1 for behind in first_ranks[1:]]
    build = Build()

    def message(kind: str, source: int, target: int, number: int) -> int:
        return build.message((kind, source, target), number)

    def with_encoders(kind: str, one: Pass) -> tuple[End, ...]:
        """This end of the decoder's messages with them."""
        sends = kind == "gradients"
        ways = [(0, each) if sends else (each, 0) for each in sources]
        return tuple((message(kind, *way, one.microbatch), sends) for way in ways)

    def decoding(turn: Turn, stage: int) -> Iterator[Act]:
        if turn.forward is not None:
            if turn.forward.chunk == stage == 0:
                yield Wait(with_encoders("activations", turn.forward))
            yield Work(decoder[turn.forward.chunk * stages + stage].forward)
        if turn.backward is not None:
            yield Work(decoder[turn.backward.chunk * stages + stage].backward)
            if turn.backward.chunk == stage == 0:
                yield Post(with_encoders("gradients", turn.backward))

    def encoding(times: Sequence[StageTime], ranks: Sequence[int], stage: int) -> Iterator[Act]:
        rank, behind = ranks[stage : stage + 2]
        before, done = ranks[stage - 1 : stage], 0
        order = forwards_first(pipeline, microbatches, behind=len(times) - 1 - stage)
        for number, count in enumerate(order):
            for each in range(done, count):
                yield Wait(tuple((message("activations", x, rank, each), False) for x in before))
                yield Work(times[stage].forward)
                yield Post(((message("activations", rank, behind, each), True),))
            yield Wait(((message("gradients", behind, rank, number), False),))
            yield Work(times[stage].backward)
            yield Post(tuple((message("gradients", rank, x, number), True) for x in before))
            done = count

    programs = [
        stage_acts(
            build,
            replace(pipeline, stage=stage),
            microbatches,
            ranks=range(stages),
            work=partial(decoding, stage=stage),
            eager=True,
            beside_sends=pipeline.chunks > 1,
        )
        for stage in range(stages)
    ]
    for first_rank, times in zip(first_ranks, encoders, strict=False):
        own = [*range(first_rank, first_rank + len(times)), 0]
        programs += [encoding(times, own, stage) for stage in range(len(times))]
    return clock.step_time(build.programs([[*each] for each in programs]))
