"""A split of a model's layers into stages, and the time of a step with it. Pure."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

from loongplug.hetero.recorded_schedule import Pipeline
from loongplug.partition.clock import StageTime, step_time
from loongplug.training.layer_costs import Cost, EntryCosts


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of an entry's ``layers`` on the stage ``number``, and what it really takes.

    A stage with virtual ones has several.
    """

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
    def slowest(self) -> tuple[str, int]:
        """Which entry the slowest stage is of, and its operations for a microbatch."""
        loads: Counter[tuple[str, int]] = Counter()
        for each in self.stages:
            loads[each.entry, each.number] += each.cost.total
        ((entry, _), most), *_ = loads.most_common(1)
        return entry, most

    def sizes(self, entry: str) -> tuple[int, ...]:
        """How many layers each stage of an entry has; each virtual one, in the layers' order."""
        return tuple(len(each.layers) for each in self.stages if each.entry == entry)


def partition(
    name: str,
    costs: Mapping[str, EntryCosts],
    *,
    believed: Mapping[str, EntryCosts],
    stages: Mapping[str, int],
    microbatches: int,
    around: Collection[str] = (),
    pipeline: Pipeline | None = None,
) -> Partition:
    """The best split of the layers if they cost what is ``believed``, at what they do cost.

    ``stages`` says how many each entry has that has some of its own, the decoder's last, which all
    others lead into. All ranks do those ``around`` the schedule, before and behind it. ``pipeline``
    is that of any of the decoder's stages where they have virtual ones.

    Raises:
        ValueError: an entry has more stages than layers.
    """
    *others, decoder = stages
    found: dict[str, list[Stage]] = {}
    for entry, number in stages.items():
        chunks = pipeline.chunks if pipeline is not None and entry == decoder else 1
        sizes = _split(entry, believed[entry], stages=number * chunks)
        found[entry] = [
            Stage(
                entry=entry,
                number=place % number,
                layers=range(*ends),
                cost=costs[entry].stage(*ends),
            )
            for place, ends in enumerate(pairwise(accumulate(sizes, initial=0)))
        ]

    def step_of(entry: str, *, behind: Sequence[str] = ()) -> float:
        """The time of a step of an entry ``behind`` others."""
        times = {
            each: [StageTime(forward=x.cost.forward, backward=x.cost.backward) for x in found[each]]
            for each in (*behind, entry)
        }
        return step_time(
            times[entry],
            microbatches=microbatches,
            encoders=[times[each] for each in behind],
            pipeline=pipeline if entry == decoder else None,
        )

    outside = microbatches * sum(costs[entry].whole().total for entry in around)
    return Partition(
        name=name,
        stages=tuple(chain.from_iterable(found.values())),
        step=step_of(decoder, behind=others) + outside,
        alone={entry: step_of(entry) for entry in stages},
        outside=outside,
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


# Stages' costs, the largest first, and how many layers each stage has.
_Found = tuple[tuple[int, ...], tuple[int, ...]]


def split(layers: int, *, stages: int, cost: Callable[[int, int], int]) -> tuple[int, ...]:
    """How many of so many ``layers`` each of ``stages`` takes, one or more, in their order.

    ``cost(start, stop)`` is what a stage with the layers from ``start`` to before ``stop`` takes;
    it is asked once for each pair. The slowest stage takes the least that is possible; of all such
    splits, the second slowest does, and so on. Of those that are equal in all this, it is the one
    with fewer layers in front, where a pipeline keeps the most activations.

    Exact, by dynamic programming over where stages end: what is put behind a prefix, the better
    prefix stays the better one.

    >>> split(4, stages=2, cost=lambda start, stop: sum([3, 1, 1, 1][start:stop]))
    (1, 3)

    Raises:
        ValueError: there are more stages than layers, or not one.
    """
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers cannot be split into {stages} stages: expected 1 to {layers} of them"
        )
    best: list[_Found | None] = [((), ()), *[None] * layers]  # by the layers that are taken
    for stage in range(stages):
        left = stages - stage - 1
        ends: list[_Found | None] = [None] * (layers + 1)
        for stop in range(stage + 1, layers - left + 1):
            before = [(n, each) for n, each in enumerate(best[:stop]) if each is not None]
            ends[stop] = min(
                (tuple(sorted((*costs, cost(start, stop)), reverse=True)), (*sizes, stop - start))
                for start, (costs, sizes) in before
            )
        best = ends
    found = best[layers]
    assert found is not None, "each stage has a layer"
    return found[1]
