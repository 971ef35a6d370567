"""Pieces of a step that encoders stream: which there are, who encodes them, and when. Pure.

The same on every rank of a model replica: it follows from the grids of the step's media alone.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from loongplug.data.microbatch import Share
from loongplug.data.positions import Grid
from loongplug.hetero.balance import shares_of
from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.pieces import cut
from loongplug.hetero.pipeline_clock import (
    DecoderPass,
    EncoderWork,
    Name,
    PassCosts,
    PieceCost,
    Step,
    decoder_passes,
)
from loongplug.hetero.stream import PieceWork, Stream
from loongplug.hetero.streaming import streamed

# Of a microbatch. There are more where replicas would have fewer than so many in a step.
_PIECES, _EACH = 4, 2
# Steps whose plans are kept: who loads media is ahead of who encodes them.
_KEPT = 32

Units = Sequence[Sequence[Grid]]  # of each microbatch, the grids of its media


@dataclass(frozen=True, kw_only=True)
class StreamedCosts:
    """What a step takes, in operations of one rank, counted alike on every rank.

    ``of_media`` is one encoder replica's for some media, ``forward`` and ``backward`` are what a
    microbatch takes in the decoder, by place (:class:`~.pipeline_clock.DecoderPass`). With several
    chunks to a rank, each takes ``group`` microbatches in turn. ``tokens`` has a medium's in the
    text. ``of_passes`` is of passes through the encoder.
    """

    of_media: Callable[[Sequence[Grid]], PieceCost]
    tokens: Callable[[Grid], int]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    group: int
    of_passes: PassCosts


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Neighbouring ``media`` of a microbatch's unit, by their numbers, and their ``rows`` of its
    features; ``replica`` encodes it."""

    microbatch: int
    media: range
    rows: slice
    replica: int

    @property
    def tokens(self) -> int:
        """How many features it has."""
        count: int = self.rows.stop - self.rows.start
        return count


@dataclass(frozen=True, kw_only=True)
class StreamedStep:
    """The ``pieces`` of a step, in order, and what each replica does with its own, by replica.

    ``passes`` are those of each stage; ``trains``: pieces have a backward.
    """

    pieces: tuple[Piece, ...]
    work: tuple[tuple[PieceWork, ...], ...]
    passes: tuple[tuple[DecoderPass, ...], ...]
    microbatches: int
    trains: bool

    def stream(self, replica: int | None) -> Stream:
        """As one replica's ranks see it; None for ranks of none."""
        behind = [0] * (self.microbatches + 1)
        for each in self.pieces:
            behind[each.microbatch + 1] += 1
        return Stream(
            work=() if replica is None else self.work[replica],
            pieces=tuple(range(first, stop) for first, stop in pairwise(accumulate(behind))),
        )

    def shares(self, tokens: Sequence[Sequence[int]]) -> tuple[tuple[Share, ...], ...]:
        """Of each unit, whose media have so many tokens: all that a replica has of it is one share.

        A unit without media has no piece. Somebody has to have it nevertheless, with nothing to do.
        """
        held: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in tokens]
        for each in self.pieces:
            held[each.microbatch][each.replica] += each.media
        return tuple(
            shares_of(of_unit or {0: ()}, tokens=each)
            for of_unit, each in zip(held, tokens, strict=True)
        )


class LastPlans[Of: Hashable, Plan]:
    """The plans of the last steps."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Of, Plan] = OrderedDict()

    def get(self, step: Of, make: Callable[[Of], Plan]) -> Plan:
        """The plan of a step, made where it is not kept."""
        if step not in self._plans:
            self._plans[step] = make(step)
            if len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        return self._plans[step]


class Planner:
    """Plans the steps of one model replica for one encoder; keeps the last ones.

    ``stages`` has the pipeline stage that each encoder replica lies on.
    """

    def __init__(self, costs: StreamedCosts, *, stages: tuple[int, ...]) -> None:
        self.costs = costs
        self.stages = stages
        self._kept: LastPlans[tuple[tuple[Grid, ...], ...], StreamedStep | None] = LastPlans()

    def shares(self, units: Units) -> tuple[tuple[Share, ...], ...] | None:
        """Of each unit of a step, given as the grids of its media; None as :meth:`plan`."""
        planned = self.plan(units)
        if planned is None:
            return None
        return planned.shares([[self.costs.tokens(grid) for grid in grids] for grids in units])

    def plan(self, units: Units) -> StreamedStep | None:
        """A step with these media; None where streaming is not faster by the clock."""
        return self._kept.get(tuple(map(tuple, units)), self._planned)

    def passes(self, microbatches: int) -> tuple[tuple[DecoderPass, ...], ...]:
        """The decoder's, of each stage, in a step of so many."""
        stages, places = 1 + max(self.stages), len(self.costs.forward)
        pipelines = (
            Pipeline(stages=stages, stage=stage, chunks=places // stages, group=self.costs.group)
            for stage in range(stages)
        )
        return tuple(decoder_passes(each, microbatches) for each in pipelines)

    def cut(
        self, grids: Sequence[Grid], *, microbatches: int, stretches: int = 1
    ) -> tuple[range, ...]:
        """The media of a unit, of a step of so many, in pieces of about one cost.

        They may be one of several ``stretches`` of it, which have equally many pieces.
        """
        count = max(_PIECES, -(-_EACH * len(self.stages) // microbatches))
        of_media = [self.costs.of_media([grid]) for grid in grids]
        return cut([each.forward + each.backward for each in of_media], -(-count // stretches))

    def _planned(self, units: tuple[tuple[Grid, ...], ...]) -> StreamedStep | None:
        costs = self.costs
        cuts = [self.cut(grids, microbatches=len(units)) for grids in units]
        step = Step(
            pieces=tuple(
                tuple(costs.of_media(grids[each.start : each.stop]) for each in media)
                for grids, media in zip(units, cuts, strict=True)
            ),
            replicas=self.stages,
            passes=self.passes(len(units)),
            forward=costs.forward,
            backward=costs.backward,
            encoders=(costs.of_passes,),
        )
        plan = streamed(step)
        if not plan.streamed:
            return None
        work = [[InTurn(each, 0) for each in of_replica] for of_replica in plan.work]
        return streamed_step(work, costs=costs, units=units, cuts=cuts, passes=step.passes)


class InTurn(NamedTuple):
    """An encoder's work of a replica, and when it comes among that before the same pass."""

    work: EncoderWork
    turn: int


def streamed_step(
    work: Sequence[Sequence[InTurn]],
    *,
    costs: StreamedCosts,
    units: Units,
    cuts: Sequence[Sequence[range]],
    passes: tuple[tuple[DecoderPass, ...], ...],
) -> StreamedStep:
    """What is to be sent and done of one encoder's ``work``, by replica.

    Names of pieces number ``cuts``: of each of the ``units``, the media of each piece.
    """
    forwards = [each.work.pieces for of_one in work for each in of_one if each.work.forward]
    runs = _runs(forwards)
    first = {names[0]: number for number, names in enumerate(runs)}
    owners = {
        name: replica
        for replica, of_one in enumerate(work)
        for each in of_one
        for name in each.work.pieces
    }
    ends = [list(accumulate(map(costs.tokens, grids), initial=0)) for grids in units]
    pieces = []
    for names in runs:
        (unit, begin), (_, end) = names[0], names[-1]
        media = range(cuts[unit][begin].start, cuts[unit][end].stop)
        rows = slice(ends[unit][media.start], ends[unit][media.stop])
        owner = owners[unit, begin]
        pieces.append(Piece(microbatch=unit, media=media, rows=rows, replica=owner))
    return StreamedStep(
        pieces=tuple(pieces),
        work=tuple(
            tuple(
                PieceWork(
                    one.before,
                    one.forward,
                    tuple(first[name] for name in one.pieces if name in first),
                    turn,
                )
                for one, turn in of_one
            )
            for of_one in work
        ),
        passes=passes,
        microbatches=len(units),
        trains=costs.of_passes.trains,
    )


def _runs(passes: Iterable[Sequence[Name]]) -> list[list[Name]]:
    """The names of pieces that are sent as one, together; all, in order.

    Those are neighbours of a microbatch that go through an encoder in one pass.
    """
    found: list[list[Name]] = []
    for names in passes:
        found.append([names[0]])
        for last, name in pairwise(names):
            if name == (last[0], last[1] + 1):
                found[-1].append(name)
            else:
                found.append([name])
    return sorted(found)
