"""A decoder's stages as programs of the clock, by Megatron's own schedules. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from loongplug.hetero.pass_order import Pipeline, Turn
from loongplug.hetero.recorded_schedule import Posted, Waited, Way, calls
from loongplug.simulate.programs import Act, Build, End, Post, Wait


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
    counts: dict[Way, int] = {}
    posted: dict[tuple[int, Way], End] = {}

    def end(way: Way) -> End:
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
