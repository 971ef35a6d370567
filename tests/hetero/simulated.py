"""Ranks of pipelines that lead into one another, without tensors: who waits for whom."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from loongplug.hetero.pass_order import Pipeline, Turn
from loongplug.hetero.step_programs import stage_acts
from loongplug.simulate.order import Deadlock, order
from loongplug.simulate.programs import Act, Build, End, Post, Programs, Wait

Rank = tuple[str, int]  # a module and one of its stages
DECODER = ("L", 0)


def finish(programs: Programs) -> bool:
    """Whether all ranks come to the end of their programs."""
    try:
        order(programs)
    except Deadlock:
        return False
    return True


def decoder_acts(
    build: Build, pipeline: Pipeline, microbatches: int, *, sources: Sequence[Rank], eager: bool
) -> list[Iterator[Act]]:
    """What a decoder's ranks do under any schedule of Megatron's, behind encoders' last stages.

    ``pipeline`` is that of any of its stages. With encoders messages are ``eager``, or not: the
    decoder never waits for its sends to them.
    """

    def ends(microbatch: int, *, sends: bool) -> tuple[End, ...]:
        ways = [(DECODER, each) if sends else (each, DECODER) for each in sources]
        return tuple((build.message(way, microbatch, eager=eager), sends) for way in ways)

    def work(turn: Turn, stage: int) -> Iterator[Act]:
        if stage == 0 and turn.forward is not None and turn.forward.chunk == 0:
            came = ends(turn.forward.microbatch, sends=False)
            yield from (Post(came), Wait(came))
        if stage == 0 and turn.backward is not None and turn.backward.chunk == 0:
            yield Post(ends(turn.backward.microbatch, sends=True))

    return [
        stage_acts(
            build,
            replace(pipeline, stage=stage),
            microbatches,
            ranks=range(pipeline.stages),
            work=partial(work, stage=stage),
        )
        for stage in range(pipeline.stages)
    ]
