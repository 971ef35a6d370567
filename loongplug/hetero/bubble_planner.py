"""Steps of the encoder that streams: its pieces, who encodes them, and when. Pure.

The same on every rank of a model replica: it follows from the grids of the step's media alone. A
plan says who loads media, and is asked for again when they are encoded: the last ones are kept.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod

from loongplug.data.microbatch import Share
from loongplug.data.sample import Grid
from loongplug.hetero.balance import cut, in_passes, shares_of
from loongplug.hetero.bubble_drafts import streamed
from loongplug.hetero.operations import EncoderWork, Stream
from loongplug.hetero.step_programs import (
    DecoderPass,
    EncoderPlan,
    Name,
    PassCosts,
    PieceCost,
    Step,
    separated_time,
)

Units = Sequence[Sequence[Grid]]  # of each microbatch, the grids of its media for the encoder

# Of a microbatch. There are more where replicas would have fewer than so many in a step.
_PIECES, _EACH = 4, 2


@dataclass(frozen=True, kw_only=True)
class StreamedCosts:
    """What a step takes, in operations of one rank, counted alike on every rank.

    ``of_media`` is one encoder replica's for some media, ``of_passes`` is of passes through the
    encoder; ``forward``, ``backward`` and ``group`` are those of :class:`~.step_programs.Step`.
    ``tokens`` has a medium's in the text. Where a step does not stream, ``assigned`` says what each
    of so many replicas encodes of its units; a pass has up to ``joined_rows`` of input, with None
    one unit.
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


@dataclass(frozen=True, kw_only=True)
class StreamedStep:
    """The ``pieces`` of a step, in order, and what each replica does with its own, by replica.

    ``shares``: who encodes what of each unit; one share for each replica that has media of it.
    ``passes`` are those of each stage; ``trains``: pieces have a backward.
    """

    pieces: tuple[Piece, ...]
    shares: tuple[tuple[Share, ...], ...]
    work: tuple[tuple[EncoderWork[int], ...], ...]
    passes: tuple[tuple[DecoderPass, ...], ...]
    trains: bool

    def stream(self, replica: int) -> Stream:
        """The step as one replica's ranks see it."""
        microbatches = [each.microbatch for each in self.pieces]
        ends = [bisect_left(microbatches, number) for number in range(len(self.shares) + 1)]
        return Stream(work=self.work[replica], pieces=tuple(map(range, ends, ends[1:])))


class StepPlanner:
    """Plans the steps of a model replica for the encoder that streams; keeps the last ones."""

    def __init__(self, costs: StreamedCosts, *, stages: Sequence[int]) -> None:
        """``stages`` are the decoder's that the encoder's replicas lie on."""
        self._costs, self._stages = costs, tuple(stages)
        self._plans: dict[Units, StreamedStep | None] = {}  # the last ones

    def shares(self, units: Units) -> tuple[tuple[Share, ...], ...] | None:
        """Who encodes what of each unit of a step; None as :meth:`plan`."""
        planned = self.plan(units)
        return None if planned is None else planned.shares

    def plan(self, units: Units) -> StreamedStep | None:
        """None where streaming is not faster by the clock."""
        key = tuple(map(tuple, units))
        if key not in self._plans:
            self.keep(key, self._planned(key))
        return self._plans[key]

    def keep(self, units: Units, plan: StreamedStep | None) -> None:
        """Know this plan of such a step: another process may have made it."""
        self._plans.pop(units, None)  # a plan that is kept again is the last one
        self._plans = dict([*self._plans.items(), (units, plan)][-32:])

    def step(self, units: Units) -> Step:
        return self._step(units, [self._cut(grids, len(units)) for grids in units])

    def separated_time(self, units: Units) -> int:
        """When the step ends by the clock where it does not stream."""
        shares = self._costs.assigned(units, len(self._stages))
        media = [
            [range(len(grids)) if each.media is None else each.media for each in of_unit]
            for grids, of_unit in zip(units, shares, strict=True)
        ]
        step = self._step(units, media)
        held: list[tuple[list[Name], list[int]]] = [([], []) for _ in self._stages]
        for unit, of_unit in enumerate(shares):
            for piece, share in enumerate(of_unit):
                names, rows = held[share.encoder_replica]
                names.append((unit, piece))
                rows.append(sum(prod(units[unit][each]) for each in media[unit][piece]))
        passes = [in_passes(*each, most=self._costs.joined_rows) for each in held]
        return separated_time(step, passes)

    def _planned(self, units: tuple[tuple[Grid, ...], ...]) -> StreamedStep | None:
        cuts = [self._cut(grids, len(units)) for grids in units]
        step = self._step(units, cuts)
        plan = streamed(step, otherwise=self.separated_time(units))
        return None if plan is None else _of_plan(plan, step, self._costs, units, cuts)

    def _cut(self, grids: Sequence[Grid], microbatches: int) -> tuple[range, ...]:
        """The media of a unit, of a step of so many, in pieces of about one cost."""
        pieces = max(_PIECES, -(-_EACH * len(self._stages) // microbatches))
        return cut([sum(self._costs.of_media([grid])) for grid in grids], pieces)

    def _step(self, units: Units, media: Sequence[Sequence[Sequence[int]]]) -> Step:
        costs = self._costs
        return Step(
            pieces=tuple(
                tuple(costs.of_media([grids[medium] for medium in own]) for own in of_unit)
                for grids, of_unit in zip(units, media, strict=True)
            ),
            replicas=self._stages,
            forward=costs.forward,
            backward=costs.backward,
            group=costs.group,
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
    sent = sorted(
        (names, replica)
        for replica, work in enumerate(plan)
        for one in work
        if one.forward
        for names in _neighbours(one.pieces)
    )
    first = {names[0]: number for number, (names, _) in enumerate(sent)}

    def numbers(one: EncoderWork[Name]) -> tuple[int, ...]:
        return tuple(first[name] for name in one.pieces if name in first)

    tokens = [list(map(costs.tokens, grids)) for grids in units]
    ends = [list(accumulate(each, initial=0)) for each in tokens]
    pieces = []
    for names, replica in sent:
        (unit, begin), (_, end) = names[0], names[-1]
        media = range(cuts[unit][begin].start, cuts[unit][end].stop)
        rows = slice(ends[unit][media.start], ends[unit][media.stop])
        pieces.append(Piece(microbatch=unit, media=media, rows=rows, replica=replica))
    owned = ((each.microbatch, each.media, each.replica) for each in pieces)
    return StreamedStep(
        pieces=tuple(pieces),
        shares=shares_of(owned, tokens=tokens),
        work=tuple(
            tuple(EncoderWork(x.before, x.forward, numbers(x)) for x in work) for work in plan
        ),
        passes=step.passes,
        trains=costs.of_passes.trains,
    )


def _neighbours(names: Sequence[Name]) -> list[list[Name]]:
    """Pieces of one pass that are sent as one: neighbours of a microbatch."""
    runs = groupby(enumerate(names), key=lambda each: (each[1][0], each[1][1] - each[0]))
    return [[name for _, name in run] for _, run in runs]
