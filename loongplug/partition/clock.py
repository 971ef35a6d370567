"""A clock of one step of 1F1B, over the stages of modules that lead into one another. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loongplug.hetero.pass_order import Pipeline, turns
from loongplug.hetero.pipeline_graph import GraphModule, distances

_Stage = tuple[str, int]  # a module and one of its stages
_Pass = tuple[_Stage, bool, int]  # forward or backward of a microbatch


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """What one microbatch takes on one stage, in any one unit of time; 0 or more."""

    forward: float
    backward: float


def step_time(
    modules: Sequence[GraphModule], times: Mapping[str, Sequence[StageTime]], *, microbatches: int
) -> float:
    """How long a step takes, from the first forward to the last backward, in the unit of ``times``.

    Every stage has ranks of its own, and ``times`` has each module's, one for each of its stages.
    A module's stages stand in a row; the last one sends to the first of the module that it leads
    into, which takes the microbatch from all that lead there and gives each its gradient. A stage
    does its passes one at a time, in the order of Megatron's 1F1B, with as many forwards before
    its first backward as stages lie behind it, and the turn's own. A forward begins when the stages
    before have done it, a backward when the stage behind has; the decoder's last stage turns
    around at once. What is sent arrives at once, and nobody waits for who receives it. A backward
    that takes no time comes in its turn all the same.

    Of p stages in a row that are equal, m microbatches take (m + p - 1) times forward and backward:
    the bubble is (p - 1) / m of the work.

    >>> stage = StageTime(forward=1, backward=2)
    >>> decoder = GraphModule(name="decoder", stages=4)
    >>> step_time([decoder], {"decoder": [stage] * 4}, microbatches=8)
    33.0

    Raises:
        ValueError: the modules are no graph that ends in one decoder.
    """
    far = distances(modules)
    assert far.keys() == {(name, stage) for name in times for stage in range(len(times[name]))}
    behind = _behind(modules)
    before: defaultdict[_Stage, list[_Stage]] = defaultdict(list)
    for stage, target in behind.items():
        before[target].append(stage)
    queues = {stage: _passes(stage, far[stage], microbatches) for stage in far}

    def awaited(one: _Pass) -> list[_Pass]:
        """What other stages have to do before it."""
        stage, forward, microbatch = one
        others = before[stage] if forward else [behind[stage]] if stage in behind else []
        return [(other, forward, microbatch) for other in others]

    ends: dict[_Pass, float] = {}
    free = dict.fromkeys(far, 0.0)
    while any(queues.values()):
        done = len(ends)
        for (module, number), queue in queues.items():
            stage, takes = (module, number), times[module][number]
            while queue and all(each in ends for each in awaited(queue[-1])):
                one = queue.pop()
                begins = max([free[stage], *(ends[each] for each in awaited(one))])
                free[stage] = begins + (takes.forward if one[1] else takes.backward)
                ends[one] = free[stage]
        assert len(ends) > done, "1F1B with these distances never waits for itself"
    return max(free.values())


def _behind(modules: Sequence[GraphModule]) -> dict[_Stage, _Stage]:
    """Of each stage but the decoder's last one, the stage that it sends to."""
    found = {}
    for module in modules:
        for stage in range(module.stages - 1):
            found[module.name, stage] = module.name, stage + 1
        if module.into is not None:
            found[module.name, module.stages - 1] = module.into, 0
    return found


def _passes(stage: _Stage, distance: int, microbatches: int) -> list[_Pass]:
    """Those of a stage that is so far from the decoder's last one; the last pass comes first."""
    # Its order is that of the first stage of a pipeline as long.
    pipeline = Pipeline(stages=distance + 1, stage=0, chunks=1, group=distance + 1)
    found = [
        (stage, forward, one.microbatch)
        for each in turns(pipeline, microbatches)
        for forward, one in ((True, each.forward), (False, each.backward))
        if one is not None
    ]
    return found[::-1]
