"""A step of 1F1B over the stages of modules that lead into one another, on the clock. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from loongplug.hetero.pass_order import Pipeline, turns
from loongplug.hetero.pipeline_graph import GraphModule, distances
from loongplug.simulate import clock
from loongplug.simulate.programs import Act, Build, Post, Wait, Work

_Stage = tuple[str, int]  # a module and one of its stages


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
    33

    Raises:
        ValueError: the modules are no graph that ends in one decoder.
    """
    far = distances(modules)
    assert far.keys() == {(name, stage) for name in times for stage in range(len(times[name]))}
    behind, build = _behind(modules), Build()
    before: defaultdict[_Stage, list[_Stage]] = defaultdict(list)
    for stage, target in behind.items():
        before[target].append(stage)

    def acts(stage: _Stage) -> Iterator[Act]:
        # Its order is that of the first stage of a pipeline as long.
        length = far[stage] + 1
        takes = times[stage[0]][stage[1]]
        for turn in turns(Pipeline(stages=length, stage=0, chunks=1, group=length), microbatches):
            for forward, one in ((True, turn.forward), (False, turn.backward)):
                if one is None:
                    continue
                others = before[stage] if forward else [behind[stage]] if stage in behind else []
                needed = (build.message((each, forward), one.microbatch) for each in others)
                yield Wait(tuple((each, False) for each in needed))
                yield Work(takes.forward if forward else takes.backward)
                yield Post(((build.message((stage, forward), one.microbatch), True),))

    return clock.step_time(build.programs([[*acts(stage)] for stage in far]))


def _behind(modules: Sequence[GraphModule]) -> dict[_Stage, _Stage]:
    """Of each stage but the decoder's last one, the stage that it sends to."""
    found = {}
    for module in modules:
        for stage in range(module.stages - 1):
            found[module.name, stage] = module.name, stage + 1
        if module.into is not None:
            found[module.name, module.stages - 1] = module.into, 0
    return found
