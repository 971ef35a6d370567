"""Steps of the encoder that streams: its pieces, who encodes them, and when. Pure.

The same on every rank of a model replica: it follows from the grids of the step's media alone. A
plan says who loads media, and is asked for again when they are encoded: the last ones are kept.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from loongplug.data.microbatch import Share
from loongplug.data.positions import Grid
from loongplug.hetero.balance import shares_of
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
from loongplug.hetero.stream import PieceWork, Stream
from loongplug.hetero.streaming import streamed

Units = Sequence[Sequence[Grid]]  # of each microbatch, the grids of its media for the encoder

# Of a microbatch. There are more where replicas would have fewer than so many in a step.
_PIECES, _EACH = 4, 2
# Steps whose plans are kept: who loads media is ahead of who encodes them.
_KEPT = 32


@dataclass(frozen=True, kw_only=True)
class StreamedCosts:
    """What a step takes, in operations of one rank, counted alike on every rank.

    ``of_media`` is one encoder replica's for some media, ``forward`` and ``backward`` are what a
    microbatch takes in the decoder, by place (:class:`~.step_costs.DecoderPass`). With several
    chunks to a rank, each takes ``group`` microbatches in turn. ``tokens`` has a medium's in the
    text. ``of_passes`` is of passes through the encoder.

    Where a step does not stream, ``assigned`` says what each of so many replicas encodes of its
    units; a pass has up to ``joined_rows`` of input, with None one unit.
    """

    of_media: Callable[[Sequence[Grid]], PieceCost]
    tokens: Callable[[Grid], int]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    group: int
    of_passes: PassCosts
    assigned: Callable[[Units, int], Sequence[tuple[Share, ...]]]
    joined_rows: int | None


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

    ``shares``: who encodes what of each unit; one share for each replica that has media of it.
    ``passes`` are those of each stage; ``trains``: pieces have a backward.
    """

    pieces: tuple[Piece, ...]
    shares: tuple[tuple[Share, ...], ...]
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


class StepPlanner:
    """Plans the steps of a model replica for the encoder that streams; keeps the last ones."""

    def __init__(self, costs: StreamedCosts, *, stages: Sequence[int]) -> None:
        """``stages`` are the decoder's that the encoder's replicas lie on."""
        self._costs, self._stages = costs, tuple(stages)
        self._kept: OrderedDict[tuple[tuple[Grid, ...], ...], StreamedStep | None] = OrderedDict()

    def shares(self, units: Units) -> tuple[tuple[Share, ...], ...] | None:
        """Who encodes what of each unit of a step; None as :meth:`plan`."""
        planned = self.plan(units)
        return None if planned is None else planned.shares

    def plan(self, units: Units) -> StreamedStep | None:
        """None where streaming is not faster by the clock."""
        key = tuple(map(tuple, units))
        if key not in self._kept:
            self._kept[key] = self._planned(units)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def step(self, units: Units) -> Step:
        """What a plan is made of."""
        return self._step(units, [self._cut(grids, len(units)) for grids in units])

    def separated_time(self, units: Units) -> int:
        """When the step ends by the clock where it does not stream."""
        shares = self._costs.assigned(units, len(self._stages))
        media = [
            [range(len(grids)) if each.media is None else each.media for each in of_unit]
            for grids, of_unit in zip(units, shares, strict=True)
        ]
        step = self._step(units, media)
        held: list[list[Name]] = [[] for _ in self._stages]
        for unit, of_unit in enumerate(shares):
            for piece, share in enumerate(of_unit):
                held[share.encoder_replica].append((unit, piece))
        work = []
        for names, stage in zip(held, self._stages, strict=True):
            rows = [sum(prod(units[unit][each]) for each in media[unit][n]) for unit, n in names]
            runs = [range(at, at + 1) for at in range(len(names))]
            if self._costs.joined_rows is not None:
                runs = in_passes(rows, joined_rows=self._costs.joined_rows)
            passes = [tuple(names[each.start : each.stop]) for each in runs]
            last = len(step.passes[stage])
            backwards = passes if step.encoder.trains else []
            work.append(
                (
                    *(EncoderWork(0, True, each) for each in passes),
                    *(EncoderWork(last, False, each) for each in backwards),
                )
            )
        plan = EncoderPlan(work=tuple(work), streamed=False)
        return separated_time(step, plan, group=self._costs.group)

    def _planned(self, units: Units) -> StreamedStep | None:
        cuts = [self._cut(grids, len(units)) for grids in units]
        step = self._step(units, cuts)
        plan = streamed(step, otherwise=self.separated_time(units))
        return _of_plan(plan, step, self._costs, units, cuts) if plan.streamed else None

    def _cut(self, grids: Sequence[Grid], microbatches: int) -> tuple[range, ...]:
        """The media of a unit, of a step of so many, in pieces of about one cost."""
        pieces = max(_PIECES, -(-_EACH * len(self._stages) // microbatches))
        return cut([sum(self._costs.of_media([grid])) for grid in grids], pieces)

    def _step(self, units: Units, media: Sequence[Sequence[Sequence[int]]]) -> Step:
        """Each of a unit's ``media``, by their numbers, is a piece."""
        costs, stages = self._costs, 1 + max(self._stages)
        pipelines = (
            Pipeline(
                stages=stages,
                stage=stage,
                chunks=len(costs.forward) // stages,
                group=costs.group,
            )
            for stage in range(stages)
        )
        return Step(
            pieces=tuple(
                tuple(costs.of_media([grids[medium] for medium in own]) for own in of_unit)
                for grids, of_unit in zip(units, media, strict=True)
            ),
            replicas=self._stages,
            passes=tuple(decoder_passes(each, len(units)) for each in pipelines),
            forward=costs.forward,
            backward=costs.backward,
            encoder=costs.of_passes,
        )


def _of_plan(
    plan: EncoderPlan,
    step: Step,
    costs: StreamedCosts,
    units: Units,
    cuts: Sequence[Sequence[range]],
) -> StreamedStep:
    """What is to be sent and done; ``cuts`` are of each unit the media of each of its pieces."""
    forwards = [each.pieces for of_one in plan.work for each in of_one if each.forward]
    runs = _runs(forwards)
    first = {names[0]: number for number, names in enumerate(runs)}
    owners = {
        name: replica
        for replica, of_one in enumerate(plan.work)
        for each in of_one
        for name in each.pieces
    }
    tokens = [list(map(costs.tokens, grids)) for grids in units]
    ends = [list(accumulate(each, initial=0)) for each in tokens]
    pieces = []
    for names in runs:
        (unit, begin), (_, end) = names[0], names[-1]
        media = range(cuts[unit][begin].start, cuts[unit][end].stop)
        rows = slice(ends[unit][media.start], ends[unit][media.stop])
        owner = owners[unit, begin]
        pieces.append(Piece(microbatch=unit, media=media, rows=rows, replica=owner))
    return StreamedStep(
        pieces=tuple(pieces),
        shares=_shares(pieces, tokens),
        work=tuple(
            tuple(
                PieceWork(
                    one.before,
                    one.forward,
                    tuple(first[name] for name in one.pieces if name in first),
                )
                for one in of_one
            )
            for of_one in plan.work
        ),
        passes=step.passes,
        microbatches=len(units),
        trains=costs.of_passes.trains,
    )


def _shares(
    pieces: Iterable[Piece], tokens: Sequence[Sequence[int]]
) -> tuple[tuple[Share, ...], ...]:
    """Of each unit, whose media have so many ``tokens``.

    A unit without media has no piece. Somebody has to have it nevertheless, with nothing to do.
    """
    held: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in tokens]
    for each in pieces:
        held[each.microbatch][each.replica] += each.media
    return tuple(
        shares_of(of_unit or {0: ()}, tokens=each)
        for of_unit, each in zip(held, tokens, strict=True)
    )


def _runs(passes: Iterable[Sequence[Name]]) -> list[list[Name]]:
    """The names of pieces that are sent as one, together; all, in order.

    Those are neighbours of a microbatch that go through the encoder in one pass.
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
