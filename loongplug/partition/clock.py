"""A clock of one step of 1F1B, over the stages of encoders and of the decoder. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from loongplug.estimate.schedule import Pipeline, pieces

_Pass = tuple[int, bool, int]  # stage, forward or backward, microbatch


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """What one microbatch takes on one stage, in any one unit of time; 0 or more."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a stage stands: the stages whose forward it waits for, the one whose backward it does.

    ``distance`` is how many stages there are on the way to the decoder's last one.
    """

    before: tuple[int, ...]
    behind: int | None
    distance: int


def step_time(
    decoder: Sequence[StageTime],
    *,
    microbatches: int,
    encoders: Sequence[Sequence[StageTime]] = (),
) -> float:
    """How long a step takes, from the first forward to the last backward, in the stages' unit.

    Every stage of every module has ranks of its own. A module's stages stand in a row, of which
    the decoder has one or more; each of ``encoders`` ends at the decoder's first stage, which
    takes the features of all of them for a microbatch and gives all of them its gradient. A stage
    does its passes in the order of Megatron's 1F1B, one at a time. Before its first backward
    it is as many microbatches ahead as stages lie between it and the decoder's last one. A
    forward begins when the stages before have done it, a backward when the stage behind has; the
    decoder's last stage turns around at once. What is sent arrives at once, and nobody waits for
    who receives it. A backward that takes no time still comes in its turn.

    Of p stages that are equal, m microbatches take (m + p - 1) times forward and backward: the
    bubble is (p - 1) / m of the work.

    >>> stage = StageTime(forward=1, backward=2)
    >>> step_time([stage] * 4, microbatches=8)
    33.0
    """
    assert decoder, "a decoder has a stage"
    times = [stage for module in (*encoders, decoder) for stage in module]
    places = _places([len(each) for each in encoders], decoder=len(decoder))
    queues = [_passes(stage, place, microbatches) for stage, place in enumerate(places)]
    ends: dict[_Pass, float] = {}
    free = [0.0] * len(times)
    left = sum(map(len, queues))
    while len(ends) < left:
        before = len(ends)
        for stage, queue in enumerate(queues):
            while queue:
                awaited = _awaited(queue[-1], places[stage])
                if not all(each in ends for each in awaited):
                    break
                done = queue.pop()
                takes = times[stage].forward if done[1] else times[stage].backward
                free[stage] = max([free[stage], *(ends[each] for each in awaited)]) + takes
                ends[done] = free[stage]
        assert len(ends) > before, "1F1B never waits for itself"
    return max(free)


def _places(encoders: Sequence[int], *, decoder: int) -> list[_Place]:
    """Of all stages, the encoders' before the decoder's, from their numbers of stages."""
    first = sum(encoders)  # of the decoder
    found: list[_Place] = []
    for stages in encoders:
        for stage in range(stages):
            number, last = len(found), stage == stages - 1
            found.append(
                _Place(
                    before=(number - 1,) if stage else (),
                    behind=first if last else number + 1,
                    distance=stages - 1 - stage + decoder,
                )
            )
    feeding = tuple(each for each, place in enumerate(found) if place.behind == first)
    for stage in range(decoder):
        number = len(found)
        found.append(
            _Place(
                before=(number - 1,) if stage else feeding,
                behind=number + 1 if stage < decoder - 1 else None,
                distance=decoder - 1 - stage,
            )
        )
    return found


def _passes(stage: int, place: _Place, microbatches: int) -> list[_Pass]:
    """Those of a stage, the last one first."""
    stages = place.distance + 1  # of which it is like the first
    order = pieces(Pipeline(stages=stages, stage=0, chunks=1, group=stages), microbatches)
    found = [
        (stage, forward, one.microbatch)
        for each in order
        for forward, one in ((True, each.forward), (False, each.backward))
        if one is not None
    ]
    return found[::-1]


def _awaited(one: _Pass, place: _Place) -> list[_Pass]:
    """What has to be done on other stages before it."""
    _, forward, microbatch = one
    if forward:
        return [(stage, True, microbatch) for stage in place.before]
    return [] if place.behind is None else [(place.behind, False, microbatch)]
