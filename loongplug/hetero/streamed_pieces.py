"""Pieces of a step that encoders stream: which there are, who encodes them, and when. Pure.

The same on every rank of a model replica: it follows from the grids of the step's media alone.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from loongplug.data.microbatch import Share
from loongplug.data.positions import Grid
from loongplug.hetero.balance import shares_of
from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.pieces import cut
from loongplug.hetero.pipeline_clock import (
    FREE,
    DecoderPass,
    EncoderPlan,
    PieceCost,
    Step,
    decoder_passes,
)
from loongplug.hetero.policies import PieceWork, Stream
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
    chunks to a rank, each takes ``group`` microbatches in turn. ``trains``: the encoder has a
    backward. ``tokens`` has a medium's in the text. ``each`` is what a pass through the encoder
    takes besides its media; pieces go together up to ``joined`` operations of their forwards.
    """

    of_media: Callable[[Sequence[Grid]], PieceCost]
    tokens: Callable[[Grid], int]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    group: int
    trains: bool
    each: PieceCost = FREE
    joined: int = 0


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


class Planner:
    """Plans the steps of one model replica; keeps the last ones.

    ``stages`` has the pipeline stage that each encoder replica lies on.
    """

    def __init__(self, costs: StreamedCosts, *, stages: tuple[int, ...]) -> None:
        self._costs = costs
        self._stages = stages
        self._kept: OrderedDict[tuple[tuple[Grid, ...], ...], StreamedStep | None] = OrderedDict()

    def shares(self, units: Units) -> tuple[tuple[Share, ...], ...] | None:
        """Of each unit of a step, given as the grids of its media; None as :meth:`plan`."""
        planned = self.plan(units)
        if planned is None:
            return None
        return planned.shares([[self._costs.tokens(grid) for grid in grids] for grids in units])

    def plan(self, units: Units) -> StreamedStep | None:
        """A step with these media; None where streaming is not faster by the clock."""
        key = tuple(map(tuple, units))
        if key not in self._kept:
            self._kept[key] = self._planned(key)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _planned(self, units: tuple[tuple[Grid, ...], ...]) -> StreamedStep | None:
        costs, stages = self._costs, 1 + max(self._stages)
        count = max(_PIECES, -(-_EACH * len(self._stages) // len(units)))
        cuts = [self._cut(grids, count) for grids in units]
        step = Step(
            pieces=tuple(
                tuple(costs.of_media(grids[each.start : each.stop]) for each in media)
                for grids, media in zip(units, cuts, strict=True)
            ),
            replicas=self._stages,
            passes=tuple(
                decoder_passes(
                    Pipeline(
                        stages=stages,
                        stage=stage,
                        chunks=len(costs.forward) // stages,
                        group=costs.group,
                    ),
                    len(units),
                )
                for stage in range(stages)
            ),
            forward=costs.forward,
            backward=costs.backward,
            trains=costs.trains,
            each=costs.each,
            joined=costs.joined,
        )
        plan = streamed(step)
        if not plan.streamed:
            return None
        runs = _runs(plan)
        first = {names[0]: number for number, names in enumerate(runs)}
        owners = {
            name: replica
            for replica, work in enumerate(plan.work)
            for one in work
            for name in one.pieces
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
                    )
                    for one in work
                )
                for work in plan.work
            ),
            passes=step.passes,
            microbatches=len(units),
            trains=costs.trains,
        )

    def _cut(self, grids: Sequence[Grid], count: int) -> tuple[range, ...]:
        """Media in pieces of about one cost."""
        of_media = [self._costs.of_media([grid]) for grid in grids]
        return cut([each.forward + each.backward for each in of_media], count)


def _runs(plan: EncoderPlan) -> list[list[tuple[int, int]]]:
    """The names of pieces that are sent as one, together; all, in order.

    Those are neighbours of a microbatch that go through an encoder in one pass.
    """
    passes = (one.pieces for work in plan.work for one in work if one.forward)
    found: list[list[tuple[int, int]]] = []
    for names in passes:
        found.append([names[0]])
        for last, name in pairwise(names):
            if name == (last[0], last[1] + 1):
                found[-1].append(name)
            else:
                found.append([name])
    return sorted(found)
