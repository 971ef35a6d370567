"""Which replica encodes which unit, and media in pieces: each in one, in order, and even."""

from functools import cache
from heapq import heapreplace
from itertools import combinations, pairwise
from math import prod
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import times_slower

from loongplug.data.microbatch import Share
from loongplug.data.sample import Grid
from loongplug.hetero.balance import (
    Balance,
    balanced,
    cut,
    imbalance,
    loads,
    plan,
)
from loongplug.training.config import compose_model

pytestmark = pytest.mark.quick

Costs = list[int]
STEPS = st.lists(st.integers(0, 50) | st.integers(0, 10**15), max_size=60)
REPLICAS = st.integers(1, 12)
COSTS = st.lists(st.integers(0, 30), max_size=8)


@cache
def encoder(name: str) -> Any:
    return compose_model(model_name=name).config.image_encoder


def owners_of(shares: tuple[tuple[Share, ...], ...]) -> tuple[int, ...]:
    """Of units that are not cut."""
    return tuple(share.encoder_replica for (share,) in shares)


def slowest(costs: Costs, encoder_replicas: tuple[int, ...], replicas: int) -> int:
    return max(loads(costs, encoder_replicas, replicas=replicas))


def in_turn(costs: Costs, replicas: int) -> tuple[int, ...]:
    return tuple(unit % replicas for unit in range(len(costs)))


def longest_first(costs: Costs, replicas: int) -> int:
    """The slowest of the plain method, written out."""
    of_replica = [0] * replicas
    for cost in sorted(costs, reverse=True):
        of_replica[of_replica.index(min(of_replica))] += cost
    return max(of_replica)


@given(STEPS, REPLICAS, st.sampled_from([0.0, 0.2]))
@settings(deadline=None)
def test_every_unit_has_one_owner_and_the_slowest_is_never_slower(
    costs: Costs, replicas: int, threshold: float
) -> None:
    encoder_replicas = plan(costs, replicas, threshold)
    assert len(encoder_replicas) == len(costs)
    assert set(encoder_replicas) <= set(range(replicas))
    assert encoder_replicas == plan(list(costs), replicas, threshold)
    assert slowest(costs, encoder_replicas, replicas) <= slowest(
        costs, in_turn(costs, replicas), replicas
    )


@given(STEPS, REPLICAS)
@settings(deadline=None)
def test_improvement_never_makes_longest_first_worse(costs: Costs, replicas: int) -> None:
    encoder_replicas = balanced(costs, replicas)
    assert set(encoder_replicas) <= set(range(replicas))
    assert slowest(costs, encoder_replicas, replicas) <= longest_first(costs, replicas)


@given(STEPS, REPLICAS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_loads_do_not_depend_on_the_order_of_units(
    costs: Costs, replicas: int, random: Random
) -> None:
    """And a unit's replica depends on its cost and, among equals, on which comes first."""
    order = list(range(len(costs)))
    random.shuffle(order)
    order.sort(key=lambda unit: unit if costs.count(costs[unit]) > 1 else -1)
    shuffled = balanced([costs[unit] for unit in order], replicas)
    assert shuffled == tuple(balanced(costs, replicas)[unit] for unit in order)
    random.shuffle(order)
    again = [costs[unit] for unit in order]
    found = loads(again, balanced(again, replicas), replicas=replicas)
    assert found == loads(costs, balanced(costs, replicas), replicas=replicas)


def test_improvement_finds_what_longest_first_misses() -> None:
    costs = [3, 3, 2, 2, 2]
    assert longest_first(costs, 2) == 7
    encoder_replicas = balanced(costs, 2)
    assert loads(costs, encoder_replicas, replicas=2) == [6, 6]


def test_in_turn_stays_where_it_is_as_good_or_even_enough() -> None:
    uneven = [10, 1, 10, 1]
    assert imbalance(uneven, in_turn(uneven, 2), replicas=2) == pytest.approx(20 / 11 - 1)
    assert sorted(loads(uneven, plan(uneven, 2), replicas=2)) == [11, 11]
    assert plan(uneven, 2, 0.9) == (0, 1, 0, 1)
    assert plan([100, 1, 1, 1], 4) == (0, 1, 2, 3)  # nothing can be won
    assert plan([0, 0, 0], 2) == (0, 1, 0)
    assert plan([], 3) == ()
    assert plan([5, 7], 1) == (0, 0)


# Media of very uneven cost: a speck of an image, and a long video.
GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 24), st.integers(1, 24)).map(
    lambda grid: (grid[0], 2 * grid[1], 2 * grid[2])
)
UNITS = st.lists(st.lists(GRIDS, max_size=12), min_size=1, max_size=6)


def cost_by_replica(balance: Balance, units: Any, shares: Any, replicas: int) -> list[int]:
    """By count, medium by medium."""
    of_replica = [0] * replicas
    for grids, of_unit in zip(units, shares, strict=True):
        for share in of_unit:
            media = range(len(grids)) if share.media is None else share.media
            (cost,) = balance.costs([[grids[number] for number in media]])
            of_replica[share.encoder_replica] += cost
    return of_replica


@given(UNITS, REPLICAS, st.sampled_from([0.0, 0.2]))
@settings(deadline=None)
def test_every_medium_is_encoded_once_and_its_rows_are_where_the_text_has_them(
    units: list[list[Grid]], replicas: int, threshold: float
) -> None:
    balance = Balance.of(encoder("qwen3_vl_tiny"), threshold=threshold)
    found = balance.assign(units, replicas=replicas)
    assert found == balance.assign([tuple(each) for each in units], replicas=replicas)
    for grids, shares in zip(units, found, strict=True):
        owners = [share.encoder_replica for share in shares]
        assert len({*owners}) == len(owners), "a replica has one share of a unit"
        assert {*owners} <= {*range(replicas)}
        if len(shares) == 1:
            assert shares[0].media is shares[0].rows is None
            continue
        numbers = [number for share in shares for number in share.media]
        assert sorted(numbers) == list(range(len(grids)))
        tokens = [prod(grid) // 4 for grid in grids]
        for share in shares:
            assert list(share.media) == sorted(share.media)
            rows = [row for part in share.rows for row in range(part.start, part.stop)]
            assert rows == [
                row
                for number in share.media
                for row in range(sum(tokens[:number]), sum(tokens[: number + 1]))
            ]
            assert all(first.stop < then.start for first, then in pairwise(share.rows))


@given(UNITS, REPLICAS)
@settings(deadline=None)
def test_the_slowest_is_never_slower_for_the_cuts_and_cuts_are_no_finer_than_it_takes(
    units: list[list[Grid]], replicas: int
) -> None:
    balance = Balance.of(encoder("qwen3_vl_tiny"))
    costs = balance.costs(units)
    found = balance.assign(units, replicas=replicas)
    now = max(cost_by_replica(balance, units, found, replicas))
    whole = plan(costs, replicas)
    assert now <= slowest(costs, whole, replicas)
    if any(len(shares) > 1 for shares in found):
        assert imbalance(costs, whole, replicas=replicas) >= 0.2
        assert now < slowest(costs, whole, replicas)
    else:
        assert owners_of(found) == whole


@pytest.mark.parametrize("name", ["qwen3_vl_8b", "qwen2_5_vl_7b"])
@pytest.mark.parametrize("alike", [True, False])
def test_one_microbatch_of_32_images_on_4_replicas(name: str, alike: bool) -> None:
    """Whole, it leaves three of four without work: 4.0 times the mean."""
    balance = Balance.of(encoder(name))
    worst = 0.0
    for seed in range(50):
        draw = Random(seed)
        sides = (32, 34) if alike else range(16, 66, 2)
        units = [[(1, draw.choice(sides), draw.choice(sides)) for _ in range(32)]]
        found = balance.assign(units, replicas=4)
        of_replica = cost_by_replica(balance, units, found, 4)
        worst = max(worst, max(of_replica) * 4 / sum(of_replica))
    assert worst <= 1.10
    costs = balance.costs(units)
    assert 1 + imbalance(costs, plan(costs, 4), replicas=4) == 4.0


def test_units_are_whole_where_that_is_even_and_pieces_are_as_large_as_they_can_be() -> None:
    image: Grid = (1, 16, 16)
    balance = Balance.of(encoder("qwen3_vl_tiny"))

    def parts(*media: int, replicas: int) -> list[list[tuple[int, ...] | None]]:
        found = balance.assign([[image] * count for count in media], replicas=replicas)
        return [[share.media for share in shares] for shares in found]

    assert parts(8, 8, 8, 8, replicas=4) == [[None]] * 4
    # A fifth above the mean is not worth the passes; more is.
    assert parts(9, 8, 8, 7, replicas=4) == [[None]] * 4
    # Only the first is more than its replica should have, and its pieces are neighbours.
    assert parts(12, 2, 2, replicas=4) == [
        [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)],
        [None],
        [None],
    ]
    # One large medium is never cut: nothing is won by cutting others.
    video: Grid = (40, 16, 16)
    found = balance.assign([[video], [image] * 4, []], replicas=4)
    assert [len(shares) for shares in found] == [1, 1, 1]


@given(COSTS, st.integers(1, 10))
def test_every_medium_is_in_one_piece(costs: list[int], count: int) -> None:
    found = cut(costs, count)
    assert [number for run in found for number in run] == list(range(len(costs)))
    assert len(found) == min(count, len(costs))
    assert all(found)


@given(COSTS, st.integers(1, 4))
def test_the_largest_is_as_small_as_can_be(costs: list[int], count: int) -> None:
    def largest(runs: list[tuple[int, int]]) -> int:
        return max(sum(costs[start:stop]) for start, stop in runs)

    if not costs:
        return
    places = min(count, len(costs)) - 1
    every = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), places)]
    least = min(largest(list(pairwise(ends))) for ends in every)
    assert largest([(run.start, run.stop) for run in cut(costs, count)]) == least


def test_as_many_pieces_as_asked_for() -> None:
    """One large medium does not leave all others together, which could not be balanced."""
    assert cut([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], 4) == (
        range(1),
        range(1, 5),
        range(5, 7),
        range(7, 10),
    )


def test_a_step_of_1024_units_over_256_replicas_is_planned_in_some_5_ms(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the costs; up to four images of different sizes to a unit. On a quiet core: the bound
    is in what it takes to count each image and to do longest first, written out plainly."""
    random = Random(0)
    sides = range(8, 50, 2)
    units = [
        [(1, random.choice(sides), random.choice(sides)) for _ in range(random.randrange(5))]
        for _ in range(1024)
    ]
    balance = Balance.of(encoder("qwen3_vl_8b"))

    def plainly() -> None:
        counted = sorted(sum(h * w + (h * w) ** 2 for _, h, w in grids) for grids in units)
        of_replica = [0] * 256
        for cost in reversed(counted):
            heapreplace(of_replica, of_replica[0] + cost)

    slower = times_slower(lambda: balance.assign(units, replicas=256), plainly)
    encoder_replicas = owners_of(balance.assign(units, replicas=256))
    costs = balance.costs(units)
    with capsys.disabled():
        print(
            f"\n1,024 units over 256 replicas: {slower:.1f} times plain work, slowest over mean"
            f" {1 + imbalance(costs, in_turn(costs, 256), replicas=256):.2f} in turn,"
            f" {1 + imbalance(costs, encoder_replicas, replicas=256):.2f} balanced"
        )
    assert slower < 8  # measured: 3.4
