"""The order of a pipeline stage's work within a step, as Megatron's schedules have it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.pipeline_parallel.schedules import get_schedule_table


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Where a stage stands; ``group`` is how many microbatches each chunk takes in turn."""

    stages: int
    stage: int
    chunks: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A microbatch's forward or backward through one of the rank's chunks."""

    forward: bool
    chunk: int
    microbatch: int


def passes(pipeline: Pipeline, microbatches: int) -> Iterator[Pass]:
    """All forwards and backwards of a step: 1F1B, interleaved with several chunks.

    >>> first = Pipeline(stages=2, stage=0, chunks=1, group=2)
    >>> "".join("fb"[not each.forward] + str(each.microbatch) for each in passes(first, 3))
    'f0f1b0f2b1b2'
    """
    order = get_schedule_table(microbatches, pipeline.chunks, pipeline.group)
    behind = pipeline.stages - pipeline.stage - 1
    ahead = behind if pipeline.chunks == 1 else 2 * behind + (pipeline.chunks - 1) * pipeline.group
    ahead = min(ahead, len(order))
    last = pipeline.chunks - 1
    forwards = [Pass(forward=True, chunk=chunk, microbatch=number) for number, chunk in order]
    backwards = [
        Pass(forward=False, chunk=last - chunk, microbatch=number) for number, chunk in order
    ]
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(order) - ahead :]
