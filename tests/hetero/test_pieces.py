"""Media in pieces: each in one, in order, none larger than need be, and even over replicas."""

from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongplug.data.sample import Grid
from loongplug.hetero.balance import Balance, cut, imbalance, plan
from loongplug.training.config import compose_model

pytestmark = pytest.mark.quick

COSTS = st.lists(st.integers(0, 30), max_size=8)


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


def test_one_microbatch_of_32_images_on_four_replicas() -> None:
    """Whole microbatches leave three of four without work."""
    balance = Balance.of(compose_model(model_name="qwen3_vl_8b").config.image_encoder)

    def slowest_over_mean(grids: list[Grid], count: int) -> float:
        costs = balance.costs([[grid] for grid in grids])
        of_pieces = [sum(costs[run.start : run.stop]) for run in cut(costs, count)]
        owners = plan(of_pieces, 4, threshold=0)
        return 1 + imbalance(of_pieces, owners, replicas=4)

    alike = [(1, 32, 32)] * 32
    assert slowest_over_mean(alike, 1) == 4
    assert slowest_over_mean(alike, 4) == 1
    for seed in range(20):
        draw = Random(seed)
        sizes = [(1, draw.randrange(16, 65, 2), draw.randrange(16, 65, 2)) for _ in range(32)]
        assert slowest_over_mean(sizes, 16) <= 1.10
