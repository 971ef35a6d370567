"""Steps that stream: who encodes which media, and when, of all encoders at once. Pure.

One plan has the work of all encoders, in the order in which the decoder needs their features. It
says who loads media, and is asked for again when they are encoded: the last ones are kept.

Encoders may have tensor parallel sizes of their own. A *lane* is the ranks of one replica of the
encoder with the largest; replicas of others that lie within a lane share its work. They do it at
one time by the clock. In a run one may be through earlier, which keeps nobody waiting: each waits
for a part of what the lane waits for, in the lane's order.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, zip_longest
from math import prod

from loongplug.data.microbatch import Share
from loongplug.data.positions import Grid
from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.pieces import cut, in_passes
from loongplug.hetero.step_costs import (
    DecoderPass,
    EncoderPlan,
    EncoderWork,
    Name,
    PassCosts,
    PieceCost,
    Step,
    decoder_passes,
)
from loongplug.hetero.step_programs import separated_time
from loongplug.hetero.streamed_pieces import (
    InTurn,
    StreamedCosts,
    StreamedStep,
    Units,
    streamed_step,
)
from loongplug.hetero.streaming import streamed

# Of a microbatch. There are more where replicas would have fewer than so many in a step.
_PIECES, _EACH = 4, 2
# Steps whose plans are kept: who loads media is ahead of who encodes them.
_KEPT = 32

_Held = tuple[Name, int]  # a piece, and its rows of input
_OfStep = tuple[tuple[tuple[Grid, ...], ...], ...]  # by encoder, units


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    """One of them: its costs, and the lane that each of its replicas lies in."""

    costs: StreamedCosts
    lanes: tuple[int, ...]

    @property
    def of_a_lane(self) -> int:
        """How many of its replicas share one."""
        return len(self.lanes) // len({*self.lanes})

    def cost(self, grids: Sequence[Grid]) -> PieceCost:
        """What a lane takes for media, as if its replicas had equal parts of them."""
        return PieceCost(*(-(-x // self.of_a_lane) for x in self.costs.of_media(grids)))

    @property
    def of_passes(self) -> PassCosts:
        """Of a lane; what is joined there may be one replica's alone."""
        found = self.costs.of_passes
        return replace(found, joined=found.joined // self.of_a_lane)

    def separated_passes(self, held: Sequence[_Held]) -> list[list[Name]]:
        """Of what a replica holds of a step that does not stream."""
        if self.costs.joined_rows is None:
            return [[name] for name, _ in held]
        runs = in_passes([rows for _, rows in held], joined_rows=self.costs.joined_rows)
        return [[name for name, _ in held[each.start : each.stop]] for each in runs]

    def cut(self, grids: Sequence[Grid], *, microbatches: int) -> tuple[range, ...]:
        """The media of a unit, of a step of so many, in pieces of about one cost."""
        pieces = max(_PIECES, -(-_EACH * len(self.lanes) // microbatches))
        of_media = [self.costs.of_media([grid]) for grid in grids]
        return cut([each.forward + each.backward for each in of_media], pieces)


class StepPlanner:
    """Plans the steps of a model replica for all encoders that stream; keeps the last ones."""

    def __init__(
        self,
        costs: Mapping[str, StreamedCosts],
        replicas: Mapping[str, Sequence[Sequence[int]]],
        *,
        stages: Mapping[int, int],
    ) -> None:
        """By the encoders' names, their ``costs`` and the ranks of their ``replicas``, as their
        edges have them. ``stages`` has the decoder's by rank.
        """
        widest = max(costs, key=lambda name: len(replicas[name][0]))
        self._stages = tuple(stages[ranks[0]] for ranks in replicas[widest])
        lane = {rank: at for at, ranks in enumerate(replicas[widest]) for rank in ranks}
        self._encoders = {
            name: _Encoder(costs=each, lanes=tuple(lane[ranks[0]] for ranks in replicas[name]))
            for name, each in costs.items()
        }
        for name in costs:
            for ranks in replicas[name]:
                assert len({lane[rank] for rank in ranks}) == 1, f"{name}: {ranks} of two lanes"
        self._kept: OrderedDict[_OfStep, dict[str, StreamedStep] | None] = OrderedDict()

    def shares(self, units: Mapping[str, Units]) -> dict[str, tuple[tuple[Share, ...], ...]] | None:
        """Who encodes what of each unit of a step, by encoder; None as :meth:`plan`."""
        planned = self.plan(units)
        if planned is None:
            return None
        return {name: step.shares for name, step in planned.items()}

    def plan(self, units: Mapping[str, Units]) -> Mapping[str, StreamedStep] | None:
        """By encoder; None where streaming is not faster by the clock, of all together."""
        key = tuple(tuple(map(tuple, units[name])) for name in self._encoders)
        if key not in self._kept:
            self._kept[key] = self._planned(units)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def step(self, units: Mapping[str, Units]) -> Step:
        """What a plan is made of, by lane; pieces of a microbatch come encoder by encoder."""
        return self._step(units, self._cuts(units))

    def separated_time(self, units: Mapping[str, Units]) -> int:
        """When the step ends by the clock where it does not stream.

        Of encoders with several replicas in a lane, these count as if they had equal parts.
        """
        shares = {
            name: each.costs.assigned(units[name], len(each.lanes))
            for name, each in self._encoders.items()
        }
        media = {
            name: [
                [range(len(grids)) if each.media is None else each.media for each in of_unit]
                for grids, of_unit in zip(units[name], shares[name], strict=True)
            ]
            for name in self._encoders
        }
        step = self._step(units, media)
        held: defaultdict[tuple[str, int], list[_Held]] = defaultdict(list)
        for unit in range(len(step.pieces)):
            number = count()
            for name, of_units in shares.items():
                for share, own in zip(of_units[unit], media[name][unit], strict=True):
                    rows = sum(prod(units[name][unit][medium]) for medium in own)
                    held[name, share.encoder_replica].append(((unit, next(number)), rows))
        work: list[list[EncoderWork]] = [[] for _ in self._stages]
        for name, encoder in self._encoders.items():
            for lane, stage in enumerate(self._stages):
                of_replicas = (
                    encoder.separated_passes(held[name, replica])
                    for replica, at in enumerate(encoder.lanes)
                    if at == lane
                )
                for of_lane in zip_longest(*of_replicas, fillvalue=()):
                    pieces = tuple(sorted(chain(*of_lane)))
                    work[lane].append(EncoderWork(0, True, pieces))
                    if encoder.costs.of_passes.trains:
                        work[lane].append(EncoderWork(len(step.passes[stage]), False, pieces))
        ordered = tuple(tuple(sorted(each, key=lambda one: one.before)) for each in work)
        plan = EncoderPlan(work=ordered, streamed=False)
        group = next(iter(self._encoders.values())).costs.group
        return separated_time(step, plan, group=group)

    def _planned(self, units: Mapping[str, Units]) -> dict[str, StreamedStep] | None:
        cuts = self._cuts(units)
        step = self._step(units, cuts)
        plan = streamed(step, otherwise=self.separated_time(units))
        if not plan.streamed:
            return None
        return {
            name: streamed_step(
                self._work_of(name, step, plan, cuts=cuts),
                costs=each.costs,
                units=units[name],
                cuts=cuts[name],
                passes=step.passes,
            )
            for name, each in self._encoders.items()
        }

    def _cuts(self, units: Mapping[str, Units]) -> dict[str, list[tuple[range, ...]]]:
        return {
            name: [each.cut(grids, microbatches=len(units[name])) for grids in units[name]]
            for name, each in self._encoders.items()
        }

    def _step(
        self, units: Mapping[str, Units], media: Mapping[str, Sequence[Sequence[Sequence[int]]]]
    ) -> Step:
        """Each of a unit's ``media``, by their numbers, is a piece."""
        encoders = [*self._encoders.items()]
        microbatches = len(next(iter(media.values())))
        numbered = [
            [
                (kind, each.cost([units[name][number][medium] for medium in own]))
                for kind, (name, each) in enumerate(encoders)
                for own in media[name][number]
            ]
            for number in range(microbatches)
        ]
        costs = encoders[0][1].costs
        return Step(
            pieces=tuple(tuple(cost for _, cost in pieces) for pieces in numbered),
            replicas=self._stages,
            passes=self._passes(costs, microbatches=microbatches),
            forward=costs.forward,
            backward=costs.backward,
            encoders=tuple(each.of_passes for _, each in encoders),
            kinds=tuple(tuple(kind for kind, _ in pieces) for pieces in numbered),
        )

    def _passes(
        self, costs: StreamedCosts, *, microbatches: int
    ) -> tuple[tuple[DecoderPass, ...], ...]:
        """The decoder's, of each stage."""
        stages, places = 1 + max(self._stages), len(costs.forward)
        pipelines = (
            Pipeline(stages=stages, stage=stage, chunks=places // stages, group=costs.group)
            for stage in range(stages)
        )
        return tuple(decoder_passes(each, microbatches) for each in pipelines)

    def _work_of(
        self,
        name: str,
        step: Step,
        plan: EncoderPlan,
        *,
        cuts: Mapping[str, Sequence[Sequence[range]]],
    ) -> list[list[InTurn]]:
        """One encoder's, by its replicas; its pieces are numbered as its own ``cuts``."""
        names = [*self._encoders]
        kind, lanes = names.index(name), self._encoders[name].lanes
        before = [
            sum(len(cuts[other][unit]) for other in names[:kind])
            for unit in range(len(step.pieces))
        ]
        owners = _owners(step, plan, kind=kind, lanes=lanes)

        def own(work: EncoderWork, replica: int) -> tuple[Name, ...]:
            return tuple(
                (unit, number - before[unit])
                for unit, number in work.pieces
                if owners.get((unit, number)) == replica
            )

        return [
            [
                InTurn(work._replace(pieces=pieces), turn)
                for work, turn in _in_turn(step, plan.work[lane])
                if (pieces := own(work, replica))
            ]
            for replica, lane in enumerate(lanes)
        ]


def _owners(step: Step, plan: EncoderPlan, *, kind: int, lanes: Sequence[int]) -> dict[Name, int]:
    """Which replica of an encoder has each of its pieces, of those in the lane that has it.

    A lane's pass is cut into parts of about one cost. The largest goes to who has had least.
    """
    found: dict[Name, int] = {}
    taken: Counter[int] = Counter()
    for lane, of_lane in enumerate(plan.work):
        replicas = [replica for replica, at in enumerate(lanes) if at == lane]
        for work in of_lane:
            if not work.forward or step.kind(work.pieces[0]) != kind:
                continue
            costs = [step.encoding(*name) for name in work.pieces]
            parts = cut(costs, len(replicas))
            for part in sorted(parts, key=lambda x: -sum(costs[x.start : x.stop])):
                replica = min(replicas, key=lambda each: (taken[each], each))
                taken[replica] += sum(costs[part.start : part.stop])
                found |= dict.fromkeys(work.pieces[part.start : part.stop], replica)
    return found


def _in_turn(step: Step, work: Sequence[EncoderWork]) -> Iterator[InTurn]:
    """A lane's; before one pass, a turn is over where another encoder has work."""
    turn, before = 0, EncoderWork(-1, True, ())
    for one in work:
        if one.before != before.before:
            turn = 0
        elif step.kind(one.pieces[0]) != step.kind(before.pieces[0]):
            turn += 1
        before = one
        yield InTurn(one, turn)
