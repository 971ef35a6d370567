"""Pieces of steps that stream: every medium once, the same on every rank, and the ranks' plans."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from math import prod
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from streamed_steps import busiest, simulate

from loongplug.data.microbatch import Share
from loongplug.data.planned_media import Assignment
from loongplug.data.sample import Grid
from loongplug.hetero.balance import Balance, in_passes
from loongplug.hetero.bubble_drafts import streamed as plan_of
from loongplug.hetero.bubble_planner import StepPlanner, StreamedCosts, Units
from loongplug.hetero.step_programs import FREE, PassCosts, PieceCost

pytestmark = pytest.mark.quick


def of_media(grids: Sequence[Grid]) -> PieceCost:
    rows = sum(map(prod, grids))
    return PieceCost(10 * rows, 20 * rows)


def tokens(grid: Grid) -> int:
    return prod(grid) // 4


def planner(
    stages: int,
    *,
    lanes: int = 1,
    chunks: int = 1,
    trains: bool = True,
    each: PieceCost = FREE,
    joined: int = 1_000_000,
    joined_rows: int | None = None,
    balanced: bool = False,
) -> StepPlanner:
    """A stage takes as long for a forward as 20 rows do.

    Where steps do not stream, units go into passes by ``joined_rows``, in turn or ``balanced``.
    """
    balance = Balance(of_frame=lambda height, width: height * width, blank=(1, 2, 2), tokens=tokens)

    def assigned(units: Units, replicas: int) -> Sequence[tuple[Share, ...]]:
        assignment = Assignment(
            replicas=replicas, by_cost=balance.assign if balanced else None, whole_steps=True
        )
        return assignment.of_step(units)

    places = stages * chunks
    costs = StreamedCosts(
        of_media=of_media,
        tokens=tokens,
        forward=(200 // chunks,) * places,
        backward=(400 // chunks,) * places,
        group=stages,
        of_passes=PassCosts(trains=trains, each=each, joined=joined),
        assigned=assigned,
        joined_rows=joined_rows,
    )
    return StepPlanner(costs, stages=[stage for stage in range(stages) for _ in range(lanes)])


GRIDS = st.sampled_from([(1, 2, 2), (1, 2, 4), (2, 4, 4)])
UNITS = st.lists(st.lists(GRIDS, max_size=6), min_size=1, max_size=6)


@given(UNITS, st.integers(2, 4), st.integers(1, 2))
@settings(max_examples=60)
def test_every_medium_is_in_one_piece_and_in_its_replica_s_share(
    units: list[list[Grid]], stages: int, lanes: int
) -> None:
    found = planner(stages, lanes=lanes).plan(units)
    assume(found is not None)
    assert found is not None
    seen = Counter((each.microbatch, medium) for each in found.pieces for medium in each.media)
    assert set(seen.values()) <= {1}
    assert seen.keys() == {(n, m) for n, grids in enumerate(units) for m in range(len(grids))}
    for number, grids in enumerate(units):
        own = [each for each in found.pieces if each.microbatch == number]
        rows = [row for each in own for row in range(each.rows.start, each.rows.stop)]
        assert rows == list(range(sum(map(tokens, grids))))  # in the order of the text
    shares = planner(stages, lanes=lanes).shares(units)
    assert shares is not None
    for number, (grids, of_unit) in enumerate(zip(units, shares, strict=True)):
        assert len({each.encoder_replica for each in of_unit}) == len(of_unit) > 0
        for each in of_unit:
            media = tuple(range(len(grids))) if each.media is None else each.media
            pieces = [
                x.media
                for x in found.pieces
                if (x.microbatch, x.replica) == (number, each.encoder_replica)
            ]
            assert tuple(chain(*pieces)) == tuple(media)


# A whole row's image or video, and tiny ones: of the last, 256 cost as much as the first.
LARGE: Sequence[Grid] = [(1, 32, 32), (8, 8, 8), (2, 4, 4), (1, 2, 4), (1, 2, 2)]
UNEVEN = st.one_of(
    st.lists(st.sampled_from(LARGE[2:]), max_size=6),
    st.lists(st.sampled_from(LARGE), max_size=6),
    st.integers(1, 24).map(lambda tiny: [LARGE[0], *[LARGE[-1]] * tiny]),
)


@given(st.data())
@settings(deadline=None)
def test_none_is_slower_than_what_runs_would_do_instead(data: st.DataObject) -> None:
    """By the clock: the slowest replica's forwards, the decoder, and the same backward."""
    stages, lanes = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.integers(1, 2))
    units = data.draw(st.lists(UNEVEN, min_size=1, max_size=6))
    options: dict[str, Any] = {
        "each": data.draw(st.sampled_from([FREE, PieceCost(1000, 2000)])),
        "joined_rows": data.draw(st.sampled_from([None, 1, 40, 2000])),
        "trains": data.draw(st.booleans()),
        "balanced": data.draw(st.booleans()),
    }
    plans = planner(stages, lanes=lanes, **options)
    step, otherwise = plans.step(units), plans.separated_time(units)
    plan = plan_of(step, otherwise=otherwise)
    assert (plans.plan(units) is not None) == (plan is not None)
    if plan is not None:
        times = simulate(step, plan)
        assert times is not None
        assert busiest(step) <= times.step < otherwise
    alone = (len(units) + stages - 1) * (200 + 400)
    held: list[list[Sequence[Grid]]] = [[] for _ in range(stages * lanes)]
    shares = plans._costs.assigned(units, stages * lanes)
    for grids, share in ((u, x) for u, of_unit in zip(units, shares, strict=True) for x in of_unit):
        own = grids if share.media is None else [grids[n] for n in share.media]
        held[share.encoder_replica].append(own)
    for way in (0, 1) if options["trains"] else (0,):
        alone += max(
            sum(of_media(grids)[way] for grids in own)
            + options["each"][way] * passes_of(own, options["joined_rows"])
            for own in held
        )
    assert otherwise == alone


def passes_of(units: Units, joined_rows: int | None) -> int:
    """How many passes a replica's units take."""
    return len(in_passes(units, [sum(map(prod, grids)) for grids in units], most=joined_rows))


def test_where_nothing_is_gained_nothing_is_planned() -> None:
    assert planner(4).plan([[]] * 8) is None
    assert planner(4).shares([[]] * 8) is None
    assert planner(4).plan([[(1, 4, 4)] * 4] * 8) is not None


def test_a_plan_is_made_once_and_is_the_same_for_all() -> None:
    one, other = planner(4), planner(4)
    units = [[(1, 4, 4)] * 4] * 8
    assert one.plan(units) is one.plan([*map(list, units)])
    assert one.shares(units) is one.shares([*map(list, units)])
    assert one.plan(units) == other.plan(units)
    for number in range(50):  # few are kept
        one.plan([[(1, 2, 2 + number)]])
    assert len(one._plans) < 50
    assert one.plan(units) == other.plan(units)


def test_few_microbatches_are_cut_finer() -> None:
    """Each replica has something: two microbatches of many images on eight replicas."""
    found = planner(4, lanes=2).plan([[(1, 4, 4)] * 32] * 2)
    assert found is not None
    assert {each.replica for each in found.pieces} == set(range(8))


@pytest.mark.parametrize(("sides", "most"), [((32, 34), 1.10), (range(16, 66, 2), 1.15)])
@pytest.mark.parametrize(("stages", "lanes"), [(4, 1), (2, 2)])
@pytest.mark.parametrize(("place", "microbatches"), [(0, 1), (0, 8), (3, 8), (7, 8)])
def test_one_microbatch_of_32_images_on_4_replicas(
    place: int, microbatches: int, stages: int, lanes: int, sides: Sequence[int], most: float
) -> None:
    """Alone, or among others of text. Whole, it would leave three of four without work: 4.0.

    Pieces are neighbours, so that sizes which vary are less even.
    """
    for seed in range(20):
        draw = Random(seed)
        images: list[Grid] = [(1, draw.choice(sides), draw.choice(sides)) for _ in range(32)]
        units = [images if number == place else [] for number in range(microbatches)]
        found = planner(stages, lanes=lanes).plan(units)
        assert found is not None
        rows = [0] * 4
        for piece in found.pieces:
            rows[piece.replica] += sum(prod(images[medium]) for medium in piece.media)
        assert 4 * max(rows) <= most * sum(rows)


def test_what_goes_through_in_one_pass_is_sent_as_one() -> None:
    """As far as it is of one microbatch, and neighbours in it; passes have several microbatches."""
    media = [(1, 4, 4)] * 4
    found = planner(2, each=PieceCost(100, 200)).plan([media] * 16)
    assert found is not None
    assert 16 <= len(found.pieces) < 64
    passes = [x.pieces for work in found.work for x in work if x.forward]
    assert len(passes) <= 16
    assert any(len({found.pieces[n].microbatch for n in numbers}) > 1 for numbers in passes)
    for numbers in passes:
        for one, other in pairwise(found.pieces[n] for n in numbers):
            if one.microbatch == other.microbatch:
                assert one.media.stop < other.media.start
    alone = planner(2, each=PieceCost(100, 200), joined=0).plan([media] * 16)
    assert alone is None or all(len(x.pieces) == 1 for work in alone.work for x in work)
