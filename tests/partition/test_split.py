"""Splits of layers into stages, against all splits that there are."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongplug.partition.stages import split

pytestmark = pytest.mark.quick


def every(layers, stages):
    """The sizes of each split into stages that are not empty."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *cuts, layers)))


def of_stages(sizes, cost):
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return [cost(start, stop) for start, stop in pairwise(ends)]


@st.composite
def cases(draw):
    """Any cost for any stretch of layers, and so few different ones that many splits are equal."""
    layers = draw(st.integers(1, 8))
    stages = draw(st.integers(1, layers))
    few = st.integers(0, draw(st.sampled_from([1, 3, 100])))
    stretches = [(start, stop) for stop in range(1, layers + 1) for start in range(stop)]
    return layers, stages, {stretch: draw(few) for stretch in stretches}


@given(cases())
def test_it_is_the_best_of_all_splits(case):
    layers, stages, table = case

    def cost(start, stop):
        return table[start, stop]

    best = min(
        every(layers, stages),
        key=lambda sizes: (sorted(of_stages(sizes, cost), reverse=True), sizes),
    )
    found = split(layers, stages=stages, cost=cost)
    assert found == best
    assert max(of_stages(found, cost)) == min(
        max(of_stages(sizes, cost)) for sizes in every(layers, stages)
    )


@pytest.mark.parametrize("stages", [0, 4])
def test_each_stage_takes_a_layer(stages):
    with pytest.raises(
        ValueError, match=rf"^3 layers cannot be split into {stages} stages: .*1 to 3"
    ):
        split(3, stages=stages, cost=lambda start, stop: stop - start)
