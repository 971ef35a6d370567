"""Several encoders in one streamed step: who does what when, of all of them. Pure.

Who encodes which media is each encoder's own affair: it is known when media are loaded, from those
of that encoder alone. When each replica does its own is planned here, for all encoders at once, in
the order in which the decoder needs their features.

Encoders may have tensor parallel sizes of their own. A *lane* is the ranks of one replica of the
encoder with the largest; replicas of others that lie within a lane share its work, each with what
is its own. They do it at one time by the clock. In a run one may be through earlier, which keeps
nobody waiting: each waits for a part of what the lane waits for, in the lane's order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from loongplug.data.microbatch import Share, Unit
from loongplug.data.positions import Grid
from loongplug.hetero.pipeline_clock import EncoderPlan, EncoderWork, PassCosts, PieceCost, Step
from loongplug.hetero.streamed_pieces import InTurn, LastPlans, Planner, StreamedStep, streamed_step
from loongplug.hetero.streaming import streamed


@dataclass(frozen=True, kw_only=True)
class OwnedUnit:
    """A microbatch's media for one encoder, and which of its replicas encodes each of them."""

    grids: tuple[Grid, ...]
    owners: tuple[int, ...]

    @classmethod
    def of(cls, grids: Sequence[Grid], shares: Sequence[Share]) -> "OwnedUnit":
        """Of a unit with these shares."""
        held = {
            medium: share.encoder_replica
            for share in shares
            for medium in (range(len(grids)) if share.media is None else share.media)
        }
        return cls(grids=tuple(grids), owners=tuple(held[medium] for medium in range(len(grids))))


Units = Mapping[str, Sequence[OwnedUnit]]  # by the encoder's name, of each microbatch


def owned_units(units: Sequence[Mapping[str, Unit]]) -> Units:
    """Of each microbatch, given by the encoders' names."""
    return {
        name: [OwnedUnit.of(each[name].grids, each[name].shares) for each in units]
        for name in units[0]
    }


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    """One of them: its planner, and the lane that each of its replicas lies in."""

    planner: Planner
    lanes: tuple[int, ...]

    @property
    def of_a_lane(self) -> int:
        """How many of its replicas share one."""
        return len(self.lanes) // len({*self.lanes})

    def cost(self, grids: Sequence[Grid]) -> PieceCost:
        """What a lane takes for media, as if its replicas had equal parts of them."""
        return PieceCost(*(-(-x // self.of_a_lane) for x in self.planner.costs.of_media(grids)))

    @property
    def of_passes(self) -> PassCosts:
        """Of a lane; what is joined there may be one replica's alone."""
        found = self.planner.costs.of_passes
        return replace(found, joined=found.joined // self.of_a_lane)

    def cut(self, unit: OwnedUnit, *, microbatches: int) -> list[range]:
        """Pieces of neighbouring media that one replica encodes."""
        numbered = groupby(range(len(unit.grids)), key=unit.owners.__getitem__)
        stretches = [list(media) for _, media in numbered]
        found = []
        for media in stretches:
            grids = [unit.grids[medium] for medium in media]
            cuts = self.planner.cut(grids, microbatches=microbatches, stretches=len(stretches))
            found += [range(media[0] + each.start, media[0] + each.stop) for each in cuts]
        return found


class StepPlanner:
    """Plans steps of all encoders of a model replica that stream; keeps the last ones.

    ``replicas`` has the ranks of each encoder's replicas, as its edge has. One encoder alone is
    planned by its own planner, which says who encodes what, too.
    """

    def __init__(
        self, planners: Mapping[str, Planner], replicas: Mapping[str, Sequence[Sequence[int]]]
    ) -> None:
        self._planners = planners
        widest = max(planners, key=lambda name: len(replicas[name][0]))
        self._stages = planners[widest].stages
        lane = {rank: at for at, ranks in enumerate(replicas[widest]) for rank in ranks}
        self._encoders = {
            name: _Encoder(planner=each, lanes=tuple(lane[ranks[0]] for ranks in replicas[name]))
            for name, each in planners.items()
        }
        for name in planners:
            for ranks in replicas[name]:
                assert len({lane[rank] for rank in ranks}) == 1, f"{name}: {ranks} of two lanes"
        self._kept: LastPlans[tuple[tuple[OwnedUnit, ...], ...], dict[str, StreamedStep] | None] = (
            LastPlans()
        )

    def plan(self, units: Units) -> Mapping[str, StreamedStep] | None:
        """By encoder; None where streaming is not faster by the clock, of all together."""
        if len(self._planners) == 1:
            ((name, planner),) = self._planners.items()
            found = planner.plan([each.grids for each in units[name]])
            return None if found is None else {name: found}
        return self._kept.get(tuple(tuple(units[name]) for name in self._encoders), self._planned)

    def _planned(self, units: tuple[tuple[OwnedUnit, ...], ...]) -> dict[str, StreamedStep] | None:
        encoders, count = [*self._encoders.values()], len(units[0])
        cuts = [
            [each.cut(unit, microbatches=count) for unit in of_encoder]
            for each, of_encoder in zip(encoders, units, strict=True)
        ]
        step = self._step(units, cuts)
        plan = streamed(step)
        if not plan.streamed:
            return None
        found = {}
        for kind, (name, each) in enumerate(self._encoders.items()):
            before = [sum(len(cuts[other][unit]) for other in range(kind)) for unit in range(count)]
            owners = {
                (unit, before[unit] + number): units[kind][unit].owners[media.start]
                for unit, of_unit in enumerate(cuts[kind])
                for number, media in enumerate(of_unit)
            }
            found[name] = streamed_step(
                [
                    [
                        InTurn(work._replace(pieces=own), turn)
                        for work, turn in _in_turn(plan, lane)
                        if (
                            own := tuple(
                                (unit, number - before[unit])
                                for unit, number in work.pieces
                                if owners.get((unit, number)) == replica
                            )
                        )
                    ]
                    for replica, lane in enumerate(each.lanes)
                ],
                costs=each.planner.costs,
                units=[unit.grids for unit in units[kind]],
                cuts=cuts[kind],
                passes=step.passes,
            )
        return found

    def _step(
        self, units: Sequence[Sequence[OwnedUnit]], cuts: Sequence[Sequence[Sequence[range]]]
    ) -> Step:
        """Of all encoders' pieces; those of a microbatch come encoder by encoder."""
        encoders, count = [*self._encoders.values()], len(units[0])
        numbered = [
            [
                (kind, media)
                for kind, of_encoder in enumerate(cuts)
                for media in of_encoder[microbatch]
            ]
            for microbatch in range(count)
        ]
        costs = encoders[0].planner.costs
        return Step(
            pieces=tuple(
                tuple(
                    encoders[kind].cost(units[kind][at].grids[media.start : media.stop])
                    for kind, media in pieces
                )
                for at, pieces in enumerate(numbered)
            ),
            replicas=self._stages,
            passes=encoders[0].planner.passes(count),
            forward=costs.forward,
            backward=costs.backward,
            encoders=tuple(each.of_passes for each in encoders),
            kinds=tuple(tuple(kind for kind, _ in pieces) for pieces in numbered),
            owners=tuple(
                tuple(
                    encoders[kind].lanes[units[kind][at].owners[media.start]]
                    for kind, media in pieces
                )
                for at, pieces in enumerate(numbered)
            ),
        )


def _in_turn(plan: EncoderPlan, lane: int) -> list[tuple[EncoderWork, int]]:
    """A lane's work, each with its number among that before the same pass."""
    seen: Counter[int] = Counter()
    found = []
    for work in plan.work[lane]:
        found.append((work, seen[work.before]))
        seen[work.before] += 1
    return found
