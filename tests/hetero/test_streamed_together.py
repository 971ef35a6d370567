"""Encoders in one streamed step: all there and back once, in one order, and nobody waits."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated import Exchange, Move, Rank, finish
from streamed_steps import busiest, simulate

from loongplug.data.microbatch import Share
from loongplug.data.positions import Grid
from loongplug.data.source import Assignment
from loongplug.hetero import policies
from loongplug.hetero.balance import Balance
from loongplug.hetero.operations import (
    BEGIN,
    Backward,
    Cargo,
    Encode,
    Kept,
    Operation,
    Receive,
    Send,
    StepPlan,
    before_pass,
    forward,
    gradient,
    turns_of,
)
from loongplug.hetero.placement import Edge
from loongplug.hetero.policies import EncoderStep, streamed
from loongplug.hetero.routes import Transfer, feature_transfers, gradient_transfers
from loongplug.hetero.step_costs import (
    FREE,
    DecoderPass,
    PassCosts,
    PieceCost,
    Step,
)
from loongplug.hetero.streamed_pieces import StreamedCosts, StreamedStep
from loongplug.hetero.streamed_together import StepPlanner
from loongplug.hetero.streaming import separated
from loongplug.hetero.streaming import streamed as plan_of

pytestmark = pytest.mark.quick

NAMES = ("eyes", "ears")
Media = list[list[Grid]]  # of each microbatch


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Beside a decoder of ``decoder_tp`` on each of ``stages``; a row costs ``row``."""

    stages: int
    decoder_tp: int
    tp: int = 1
    row: int = 10
    trains: bool = True
    each: PieceCost = FREE
    chunks: int = 1
    attention: bool = False
    balanced: bool = False  # this and the next where the step does not stream
    joined_rows: int | None = 200

    @property
    def edge(self) -> Edge:
        ranks = range(self.stages * self.decoder_tp)
        starts = ranks[:: self.tp]
        return Edge(
            replicas=tuple(tuple(ranks[at : at + self.tp]) for at in starts),
            consumers=tuple(ranks[: self.decoder_tp]),
        )

    @property
    def costs(self) -> StreamedCosts:
        def of_media(grids: Sequence[Grid]) -> PieceCost:
            rows = [prod(grid) for grid in grids or ([(1, 4, 4)] if self.attention else [])]
            pairs = sum(each**2 for each in rows) // 16 if self.attention else 0
            work = (sum(map(prod, grids)) * self.row + pairs) // self.tp
            return PieceCost(work, 2 * work)

        places = self.stages * self.chunks
        return StreamedCosts(
            of_media=of_media,
            tokens=lambda grid: prod(grid) // 4,
            forward=(400 // self.chunks,) * places,
            backward=(800 // self.chunks,) * places,
            group=self.stages,
            of_passes=PassCosts(trains=self.trains, each=self.each, joined=2000),
            assigned=self.assigned,
            joined_rows=self.joined_rows,
        )

    def assigned(self, units: Sequence[Sequence[Grid]], replicas: int) -> list[tuple[Share, ...]]:
        """As runs have it, with ``--use-vit-dp-balance`` or without."""
        balance = Balance(
            of_frame=lambda height, width: self.row * height * width,
            blank=(1, 2, 2),
            tokens=lambda grid: prod(grid) // 4,
        )
        assignment = Assignment(
            replicas=replicas, by_cost=balance.assign, whole_steps=self.balanced
        )
        return assignment.of_step(units)


Encoders = Mapping[str, Encoder]


def planner(encoders: Encoders) -> StepPlanner:
    some = next(iter(encoders.values()))
    return StepPlanner(
        {name: each.costs for name, each in encoders.items()},
        {name: each.edge.replicas for name, each in encoders.items()},
        stages={rank: rank // some.decoder_tp for rank in range(some.stages * some.decoder_tp)},
    )


def together(encoders: Encoders, media: Mapping[str, Media]) -> Mapping[str, StreamedStep] | None:
    return planner(encoders).plan(media)


@dataclass
class Run:
    """All ranks' programs of a step, and which pieces pass between two ranks, at each end."""

    encoders: Encoders
    found: Mapping[str, StreamedStep]
    late: str = ""  # whose work comes behind the decoder's last pass
    programs: dict[Rank, list[Exchange]] = field(default_factory=dict)
    pieces: defaultdict[tuple[str, int, int, bool], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    back: defaultdict[tuple[str, int, int], int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        some = next(iter(self.encoders.values()))
        self._tp, self._stages = some.decoder_tp, some.stages
        self._passes = next(iter(self.found.values())).passes
        self._there, self._back = (
            {
                name: transfers(each.edge, [(x.replica,) for x in self.found[name].pieces])
                for name, each in self.encoders.items()
            }
            for transfers in (feature_transfers, gradient_transfers)
        )
        for rank in range(self._stages * self._tp):
            plans = {name: self.plan(name, rank) for name in self.encoders}
            self.programs["rank", rank] = list(self._program(rank, plans))

    def plan(self, name: str, rank: int) -> StepPlan:
        encoder, found = self.encoders[name], self.found[name]
        replica = encoder.edge.replica_of(rank)
        return streamed(
            EncoderStep(
                encoder_replicas=((0,),) * found.microbatches,
                replicas=len(encoder.edge.replicas),
                replica=replica,
                consumes=rank in encoder.edge.consumers,
                training=True,
                trains=found.trains,
                last_stage=rank // self._tp == self._stages - 1,
                stream=found.stream(replica),
            )
        )

    def _program(self, rank: int, plans: Mapping[str, StepPlan]) -> Iterator[Exchange]:
        stage, places = rank // self._tp, self._places
        for number, one in enumerate([*self._passes[stage], None]):
            yield from self._work(rank, plans, number)
            if one is None:
                return
            before, behind = _neighbours(one, places)
            if before is not None and before.place % self._stages != stage:
                yield (self._pass(before, rank, sends=False),)
            for name, plan in plans.items() if one[:2] == (True, 0) else ():
                for each in plan.get(forward(one.microbatch), ()):
                    yield from self._moves(name, rank, each)
            yield from self._meet(rank, range(stage * self._tp, (stage + 1) * self._tp), "pass")
            for name, plan in plans.items() if one[:2] == (False, 0) else ():
                for each in plan.get(gradient(one.microbatch), ()):
                    yield from self._moves(name, rank, each)
            if behind is not None and behind.place % self._stages != stage:
                yield (self._pass(one, rank, sends=True, to=behind.place % self._stages),)

    @property
    def _places(self) -> int:
        return self._stages * next(iter(self.encoders.values())).chunks

    def _work(self, rank: int, plans: Mapping[str, StepPlan], number: int) -> Iterator[Exchange]:
        turns = range(max(map(turns_of, plans.values())))
        last = len(self._passes[0])
        for turn, name in ((turn, name) for turn in turns for name in plans):
            numbers = [number] if name != self.late else range(last + 1) if number == last else []
            for each in chain(*(plans[name].get(before_pass(n, turn), ()) for n in numbers)):
                yield from self._moves(name, rank, each)

    def _moves(self, name: str, rank: int, operation: Operation) -> Iterator[Exchange]:
        there, back = self._there[name], self._back[name]
        match operation:
            case Encode(pieces=pieces) | Backward(pieces=pieces):
                edge = self.encoders[name].edge
                replica = edge.replica_of(rank)
                assert replica is not None
                assert {self.found[name].pieces[n].replica for n in pieces} == {replica}
                for number in pieces if isinstance(operation, Backward) else ():
                    self.back[name, number, rank] += 1
                yield from self._meet(rank, edge.replicas[replica], f"layers of {name}")
            case Send(what=what, piece=piece) | Receive(what=what, piece=piece):
                transfers = there if what is Cargo.FEATURES else back
                sends = isinstance(operation, Send)
                yield from self._sent(f"{what} of {name}", rank, transfers, [piece], sends=sends)

    def _sent(
        self, what: str, rank: int, of_all: list[Transfer], pieces: Sequence[int], *, sends: bool
    ) -> Iterator[Exchange]:
        for each in (x for piece in pieces for x in of_all if x.unit == piece):
            if rank == (each.source if sends else each.target):
                self.pieces[what, each.source, each.target, sends].append(each.unit)
                source, target = ("rank", each.source), ("rank", each.target)
                yield (Move(sends=sends, source=source, target=target, what=what),)

    def _meet(self, rank: int, ranks: Sequence[int], what: str) -> Iterator[Exchange]:
        here, others = ("rank", rank), [("rank", other) for other in ranks if other != rank]
        yield tuple(Move(sends=True, source=here, target=each, what=what) for each in others)
        yield tuple(Move(sends=False, source=each, target=here, what=what) for each in others)

    def _pass(self, one: DecoderPass, rank: int, *, sends: bool, to: int = 0) -> Move:
        """What ``one`` has made, at either end; ``to`` is the stage that it goes to."""
        other = (to if sends else one.place % self._stages) * self._tp + rank % self._tp
        here, there = ("rank", rank), ("rank", other)
        source, target = (here, there) if sends else (there, here)
        return Move(sends=sends, source=source, target=target, what=f"{one.forward} {one.place}")


def _neighbours(one: DecoderPass, places: int) -> tuple[DecoderPass | None, DecoderPass | None]:
    """What a pass waits for, and what waits for it."""
    way = [(True, place) for place in range(places)]
    way += [(False, place) for place in reversed(range(places))]
    at = way.index((one.forward, one.place))
    before = DecoderPass(*way[at - 1], one.microbatch) if at else None
    behind = DecoderPass(*way[at + 1], one.microbatch) if at + 1 < len(way) else None
    return before, behind


# A whole row's image or video, and tiny ones: of the last, 256 cost as much as the first.
GRIDS: Sequence[Grid] = [(1, 32, 32), (8, 8, 8), (2, 4, 4), (1, 2, 4), (1, 2, 2)]
UNITS = st.one_of(
    st.lists(st.sampled_from(GRIDS[2:]), max_size=6),
    st.lists(st.sampled_from(GRIDS), max_size=6),
    st.integers(1, 24).map(lambda tiny: [GRIDS[0], *[GRIDS[-1]] * tiny]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Encoders, dict[str, Media]]:
    """One encoder or two, and media for them, of costs that may be very uneven."""
    stages, tp = draw(st.sampled_from([2, 3, 4, 8])), draw(st.sampled_from([1, 2]))
    chunks = draw(st.integers(1, 2))
    count = draw(st.integers(1, 6)) if chunks == 1 else stages * draw(st.integers(1, 2))
    encoders = {
        name: Encoder(
            stages=stages,
            decoder_tp=tp,
            tp=draw(st.sampled_from([1, tp])),
            row=draw(st.integers(1, 20)),
            trains=draw(st.booleans()),
            each=draw(st.sampled_from([FREE, PieceCost(100, 200)])),
            chunks=chunks,
            attention=draw(st.booleans()),
            balanced=draw(st.booleans()),
            joined_rows=draw(st.sampled_from([None, 1, 40, 200, 2000])),
        )
        for name in draw(st.sampled_from([NAMES, NAMES[:1]]))
    }
    of_step = st.lists(UNITS, min_size=count, max_size=count)
    return encoders, {name: draw(of_step) for name in encoders}


@given(cases())
@settings(deadline=None)
def test_all_goes_there_and_back_once(case: tuple[Encoders, dict[str, Media]]) -> None:
    encoders, media = case
    found = together(encoders, media)
    assume(found is not None)
    assert found is not None
    run = Run(encoders, found)
    for name, step in found.items():
        seen = [(x.microbatch, medium) for x in step.pieces for medium in x.media]
        assert seen == [(n, m) for n, grids in enumerate(media[name]) for m in range(len(grids))]
        backward = [(of_name, n, rank) for of_name, n, rank in run.back if of_name == name]
        replicas = encoders[name].edge.replicas
        owed = [(name, n, rank) for n, x in enumerate(step.pieces) for rank in replicas[x.replica]]
        assert sorted(backward) == (sorted(owed) if encoders[name].trains else [])
    assert set(run.back.values()) <= {1}
    for (what, source, target, sends), pieces in run.pieces.items():
        assert pieces == run.pieces.get((what, source, target, not sends)), (what, source, target)
        assert pieces == sorted(pieces)
    assert finish(run.programs)


@given(cases())
@settings(deadline=None)
def test_none_is_slower_than_what_runs_would_do_instead(
    case: tuple[Encoders, dict[str, Media]],
) -> None:
    """By the clock, where media are assigned with balance or without."""
    encoders, media = case
    plans = planner(encoders)
    step, otherwise = plans.step(media), plans.separated_time(media)
    plan = plan_of(step, otherwise=otherwise)
    assert (plans.plan(media) is not None) == plan.streamed
    if plan.streamed:
        times = simulate(step, plan)
        assert times is not None
        assert busiest(step) <= times.step < otherwise
    if len({each.tp for each in encoders.values()}) == 1:
        assert otherwise == phases(
            encoders, media, decoder=replace(step, pieces=((),) * len(step.pieces), kinds=())
        )


def phases(encoders: Encoders, media: Mapping[str, Media], *, decoder: Step) -> int:
    """One behind the other: the slowest replica's forwards, the decoder, and the same backward.

    Replicas have the passes of their steps' plans.
    """
    alone = simulate(decoder, separated(decoder))
    assert alone is not None
    of_replicas = [[0, 0] for _ in decoder.replicas]
    for name, encoder in encoders.items():
        shares = encoder.assigned(media[name], len(of_replicas))
        for replica, found in enumerate(of_replicas):
            held = [
                grids if each.media is None else [grids[n] for n in each.media]
                for grids, of_unit in zip(media[name], shares, strict=True)
                for each in of_unit
                if each.encoder_replica == replica
            ]
            costs = [encoder.costs.of_media(grids) for grids in held]
            passes = as_planned([sum(map(prod, grids)) for grids in held], encoder)
            found[0] += sum(each.forward for each in costs) + passes * encoder.each.forward
            if encoder.trains:
                found[1] += sum(each.backward for each in costs) + passes * encoder.each.backward
    return alone.step + sum(max(way) for way in zip(*of_replicas, strict=True))


def as_planned(rows: list[int], encoder: Encoder) -> int:
    """How many passes a run's plan makes of a replica's units with so many rows."""
    away = encoder.joined_rows is None
    plan = policies.separated(
        EncoderStep(
            encoder_replicas=((0,),) * len(rows),
            replicas=1,
            replica=0,
            consumes=False,
            training=True,
            trains=True,
            last_stage=False,
            on_host=frozenset({Kept.ACTIVATIONS} if away else ()),
            rows=tuple(rows),
            joined_rows=encoder.joined_rows or 200,
        )
    )
    return sum(isinstance(each, Encode) and bool(each.pieces) for each in plan[BEGIN])


def even(*, trains: bool = True, stages: int = 4) -> tuple[Encoders, dict[str, Media]]:
    """Two encoders, one of TP 2; a rank takes as long for a medium of either."""
    eyes = Encoder(stages=stages, decoder_tp=2, row=8)
    ears = Encoder(stages=stages, decoder_tp=2, tp=2, row=16, trains=trains)
    media = [[(1, 8, 8)] * 4 for _ in range(16)]
    return {"eyes": eyes, "ears": ears}, {"eyes": media, "ears": media}


@pytest.mark.parametrize("trains", [True, False])
def test_both_work_between_passes_and_take_turns(trains: bool) -> None:
    encoders, media = even(trains=trains)
    found = together(encoders, media)
    assert found is not None
    for name, step in found.items():
        last = len(step.passes[0])
        assert any(0 < work.before < last for work in chain(*step.work)), name
        assert any(not work.forward for work in chain(*step.work)) == encoders[name].trains
    turns = [
        {(work.before, work.turn) for work in found[name].work[0]} for name in ("eyes", "ears")
    ]
    assert not turns[0] & turns[1], "one at a time"
    assert any(turn for _, turn in turns[0] | turns[1])
    assert not finish(Run(encoders, found, late="ears").programs)


@pytest.mark.parametrize(("stages", "most"), [(2, 1.01), (4, 1.05), (8, 1.12)])
def test_close_to_the_busiest_ranks_work(stages: int, most: float) -> None:
    """By the clock of the plan for both."""
    encoders, media = even(stages=stages)
    step = planner(encoders).step(media)
    before, now = simulate(step, separated(step)), simulate(step, plan_of(step))
    assert before is not None
    assert now is not None
    assert now.step <= most * busiest(step) < before.step
    assert now.features_held() < before.features_held()


@given(cases())
@settings(deadline=None)
def test_each_medium_is_loaded_by_the_replica_that_encodes_it(
    case: tuple[Encoders, dict[str, Media]],
) -> None:
    """And by no other: what is read and what is broadcast follows from the shares."""
    encoders, media = case
    plans = planner(encoders)
    shares, found = plans.shares(media), plans.plan(media)
    assert (shares is None) == (found is None)
    for name, step in (found or {}).items():
        encoded = {(x.microbatch, medium): x.replica for x in step.pieces for medium in x.media}
        assert shares is not None
        loads = [
            ((number, medium), share.encoder_replica)
            for number, of_unit in enumerate(shares[name])
            for share in of_unit
            for medium in (range(len(media[name][number])) if share.media is None else share.media)
        ]
        assert dict(loads) == encoded
        assert len(loads) == len(encoded) == sum(map(len, media[name]))


def test_loads_are_even_where_media_of_both_are_not() -> None:
    """Of one plan. Each encoder's own would give the same ranks more, not knowing of the other."""
    draw = Random(3)
    encoders = {name: Encoder(stages=2, decoder_tp=1, row=8) for name in NAMES}
    media = {
        name: [[(1, 8, 8 * draw.randint(1, 4))] * draw.randint(0, most) for _ in range(16)]
        for name, most in zip(NAMES, (5, 3), strict=True)
    }
    plans = planner(encoders)
    step = plans.step(media)
    times = simulate(step, plan_of(step))
    assert times is not None
    assert times.step <= 1.01 * busiest(step)
    found = plans.plan(media)
    assert found is not None
    rows = [0, 0]
    for name, of_encoder in found.items():
        for piece in of_encoder.pieces:
            rows[piece.replica] += sum(prod(media[name][piece.microbatch][n]) for n in piece.media)
    assert max(rows) <= 1.02 * sum(rows) / 2


@pytest.mark.parametrize("media_each", [1, 4])
def test_replicas_of_one_lane_share_its_work(media_each: int) -> None:
    """Of an encoder of TP 1 beside one of TP 2, also where a microbatch has one medium alone."""
    encoders, _ = even()
    media: dict[str, Media] = {name: [[(1, 8, 8)] * media_each] * 16 for name in NAMES}
    found = together(encoders, media)
    assert found is not None
    held = Counter(piece.replica for piece in found["eyes"].pieces for _ in piece.media)
    lanes = [held[2 * lane] + held[2 * lane + 1] for lane in range(4)]
    assert sum(lanes) == 16 * media_each
    for lane, of_lane in enumerate(lanes):
        assert abs(held[2 * lane] - held[2 * lane + 1]) <= max(1, of_lane // 8), held


def test_without_media_nothing_is_planned() -> None:
    encoders, media = even()
    assert together(encoders, {name: [[]] * 16 for name in media}) is None
    one_has_none = {"eyes": media["eyes"], "ears": [[]] * 16}
    found = together(encoders, one_has_none)
    assert found is not None
    assert found["ears"].pieces == ()
