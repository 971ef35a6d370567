"""A split of a model's layers into stages, and the time of a step with it. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from loongplug.hetero.pipeline_graph import GraphModule
from loongplug.partition.clock import StageTime, step_time
from loongplug.partition.split import split
from loongplug.training.layer_costs import Cost, EntryCosts


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of an entry: its layers, counted over the whole entry, and what it really takes."""

    entry: str
    number: int
    layers: range
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A split, called ``name``: the stages of encoders first, then the decoder's.

    ``step`` is how long a step takes, as the operations that a rank could do meanwhile; ``alone``
    how long it would take each entry that has stages, if it waited for no other. ``outside`` is
    what of the step lies before and behind the schedule, and so is the same for every split.
    """

    name: str
    stages: tuple[Stage, ...]
    step: float
    alone: Mapping[str, float] = field(default_factory=dict)
    outside: int = 0

    @property
    def slowest(self) -> int:
        """Operations of the slowest stage for a microbatch."""
        return max(each.cost.total for each in self.stages)

    def sizes(self, entry: str) -> tuple[int, ...]:
        """How many layers each stage of an entry has."""
        return tuple(len(each.layers) for each in self.stages if each.entry == entry)


def partition(
    name: str,
    costs: Mapping[str, EntryCosts],
    *,
    believed: Mapping[str, EntryCosts],
    stages: Mapping[str, int],
    microbatches: int,
    around: Collection[str] = (),
) -> Partition:
    """The best split of the layers if they cost what is ``believed``, at what they do cost.

    ``stages`` says how many each entry has that has some of its own, the decoder's last, which all
    others lead into. All ranks do those ``around`` the schedule, before and behind it.

    Raises:
        ValueError: an entry has more stages than layers.
    """
    found: list[Stage] = []
    for entry, number in stages.items():
        sizes = _split(entry, believed[entry], stages=number)
        start = 0
        for place, size in enumerate(sizes):
            layers = range(start, start + size)
            cost = costs[entry].stage(layers.start, layers.stop)
            found.append(Stage(entry=entry, number=place, layers=layers, cost=cost))
            start += size
    times = {
        entry: [
            StageTime(forward=each.cost.forward, backward=each.cost.backward)
            for each in found
            if each.entry == entry
        ]
        for entry in stages
    }
    *_, decoder = stages
    modules = [
        GraphModule(name=entry, stages=number, into=None if entry == decoder else decoder)
        for entry, number in stages.items()
    ]
    step = step_time(modules, times, microbatches=microbatches)
    alone = {
        each.name: step_time(
            [replace(each, into=None)], {each.name: times[each.name]}, microbatches=microbatches
        )
        for each in modules
    }
    outside = microbatches * sum(costs[entry].whole().total for entry in around)
    return Partition(
        name=name, stages=tuple(found), step=step + outside, alone=alone, outside=outside
    )


def _split(entry: str, believed: EntryCosts, *, stages: int) -> tuple[int, ...]:
    try:
        return split(
            len(believed.layers),
            stages=stages,
            cost=lambda start, stop: believed.stage(start, stop).total,
        )
    except ValueError as error:
        raise ValueError(f"{entry}: {error}") from None
