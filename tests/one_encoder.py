"""Plans of steps that stream, of a model with one encoder."""

from collections.abc import Sequence

from loongplug.data.microbatch import Share
from loongplug.data.source import Assignment
from loongplug.hetero.streamed_pieces import StreamedCosts, StreamedStep, Units
from loongplug.hetero.streamed_together import StepPlanner

_NAME = "eyes"


def in_turn(units: Units, replicas: int) -> list[tuple[Share, ...]]:
    """Who encodes a step's units where it does not stream, without balance."""
    return Assignment(replicas=replicas).of_step(units)


class OneEncoder:
    """Of one rank to each replica, which lie on these ``stages``."""

    def __init__(self, costs: StreamedCosts, *, stages: Sequence[int]) -> None:
        replicas = [(rank,) for rank in range(len(stages))]
        self.planner = StepPlanner(
            {_NAME: costs}, {_NAME: replicas}, stages=dict(enumerate(stages))
        )

    def plan(self, units: Units) -> StreamedStep | None:
        """As the planner's."""
        found = self.planner.plan({_NAME: units})
        return None if found is None else found[_NAME]

    def shares(self, units: Units) -> tuple[tuple[Share, ...], ...] | None:
        """As the planner's."""
        found = self.planner.shares({_NAME: units})
        return None if found is None else found[_NAME]
