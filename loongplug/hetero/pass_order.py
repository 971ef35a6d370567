"""The order of a pipeline stage's passes within a step, as Megatron's schedules have it. Pure.

Modules on ranks of their own are pipelines that lead into one another and at last into the decoder.
Each rank runs Megatron's 1F1B: some forwards to warm up, then a forward and a backward in turn,
then the backwards that are left. With as many warm-up forwards as stages lie between it and the
decoder's last one, no rank waits for a gradient that its own next output is needed for, as long as
nobody waits for a send between modules (figure 4(a) and appendix D of the MIMO paper; upstream
counts from the sources instead, which is too many where encoders are not equally deep).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.pipeline_parallel.schedules import get_schedule_table

from loongplug.hetero.operations import (
    BEGIN,
    END,
    When,
    backward,
    before_pass,
    forward,
    gradient,
)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Where a stage stands; ``group`` is how many microbatches each chunk takes in turn.

    With ``overlaps`` one microbatch's forward runs together with another's backward.
    """

    stages: int
    stage: int
    chunks: int
    group: int
    overlaps: bool = False

    def ahead(self, microbatches: int) -> int:
        """How many forwards there are before the first backward."""
        behind = self.stages - self.stage - 1
        ahead = behind if self.chunks == 1 else 2 * behind + (self.chunks - 1) * self.group
        return min(ahead + self.overlaps, microbatches * self.chunks)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A microbatch's way through one of the rank's chunks, forward or backward."""

    chunk: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a stage does at a time: a forward, a backward, or both together."""

    forward: Pass | None = None
    backward: Pass | None = None

    @property
    def name(self) -> str:
        """In words."""
        there = (("forward", self.forward), ("backward", self.backward))
        return " with ".join(name for name, each in there if each is not None)


def turns(pipeline: Pipeline, microbatches: int) -> Iterator[Turn]:
    """All forwards and backwards of a step: 1F1B, interleaved with several chunks.

    >>> first = Pipeline(stages=2, stage=0, chunks=1, group=2)
    >>> [each.name[0] for each in turns(first, 3)]
    ['f', 'f', 'b', 'f', 'b', 'b']
    """
    order = get_schedule_table(microbatches, pipeline.chunks, pipeline.group)
    ahead, last = pipeline.ahead(microbatches), pipeline.chunks - 1
    forwards = [Pass(chunk=chunk, microbatch=number) for number, chunk in order]
    backwards = [Pass(chunk=last - chunk, microbatch=number) for number, chunk in order]
    for one in forwards[:ahead]:
        yield Turn(forward=one)
    for one, other in zip(forwards[ahead:], backwards, strict=False):
        if pipeline.overlaps:
            yield Turn(forward=one, backward=other)
        else:
            yield Turn(forward=one)
            yield Turn(backward=other)
    for one in backwards[len(order) - ahead :]:
        yield Turn(backward=one)


def around(turn: Turn) -> Iterator[When | Turn]:
    """A turn of a stage, and the moments of an encoder's plan before and behind it."""
    if turn.forward is not None and turn.forward.chunk == 0:
        yield forward(turn.forward.microbatch)
    if turn.backward is not None and turn.backward.chunk == 0:
        yield backward(turn.backward.microbatch)
    yield turn
    if turn.backward is not None and turn.backward.chunk == 0:
        yield gradient(turn.backward.microbatch)


def events(pipeline: Pipeline, microbatches: int) -> Iterator[When | Turn]:
    """All turns of a stage in a step, and all moments of the plans of its encoders.

    Where two passes are one turn, no plan has moments between passes.
    """
    passes = [*turns(pipeline, microbatches)]
    yield BEGIN
    for number, turn in enumerate(passes):
        yield before_pass(number)
        yield from around(turn)
    yield before_pass(len(passes))
    yield END


def enough(pipeline: Pipeline, microbatches: int) -> int:
    """As few microbatches as make a step in which there is any pair of passes that there is.

    What a step of ``microbatches`` has besides are repetitions of its steady state. The last group
    may be smaller than the others; then two of them are whole.
    """
    period = pipeline.group * pipeline.chunks
    steady = 2 * period if microbatches % pipeline.group else period
    more = microbatches * pipeline.chunks - pipeline.ahead(microbatches) - steady
    return microbatches - max(0, more) // period * pipeline.group


def stands_for(pipeline: Pipeline, microbatches: int, *, number: int) -> int:
    """Which turn of the step of :func:`enough` microbatches is like turn ``number`` of the whole.

    So are the turns before the two.
    """
    turns_each = 1 if pipeline.overlaps else 2  # of a microbatch in a chunk, in the steady state
    period = pipeline.group * pipeline.chunks * turns_each
    first = pipeline.ahead(microbatches)  # of the steady state
    left_out = (microbatches - enough(pipeline, microbatches)) * pipeline.chunks * turns_each
    if number < first + period:
        return number
    if number >= first + period + left_out:
        return number - left_out
    return first + (number - first) % period


def ahead(*, pipeline: int, virtual: bool, group: int | None = None) -> int:
    """Forwards of the decoder's first chunk before its first backward.

    ``pipeline`` is the decoder's pipeline parallel size. ``virtual``: its ranks hold several
    chunks each, and Megatron's interleaved schedule runs ``group`` microbatches of a chunk before
    it goes on to the next; None for its default, as many as stages. More chunks or the overlap of
    MoE communication change nothing, and a ``group`` of more can need less than this.
    """
    assert pipeline > 0, pipeline
    if not virtual or pipeline == 1:
        return pipeline
    return 2 * (group or pipeline)


def warmup(*, ahead: int, stages: int, stage: int) -> int:
    """How many forwards an encoder's ``stage``, of ``stages``, does before its first backward.

    ``ahead`` is what comes behind the last of them (:func:`ahead`). Where the decoder runs plain
    1F1B, this is the distance to its last stage; a short step has fewer. One more is what the stage
    can have sent that nobody has taken yet: where gradients come back to it, the one of the
    microbatch so many before is here before each forward, and where none do, nothing else holds the
    stage back, and so it keeps no more than a stage that trains.
    """
    assert 0 <= stage < stages, (stage, stages)
    return ahead + stages - 1 - stage
