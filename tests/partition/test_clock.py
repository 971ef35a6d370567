"""The partition's clock: against steps drawn by hand, formulas, and published rates."""

import pytest

from loongplug.hetero.recorded_schedule import Pipeline
from loongplug.partition.clock import StageTime, step_time

pytestmark = pytest.mark.quick

BOTH = StageTime(forward=1, backward=2)


def stages(*times):
    return [StageTime(forward=forward, backward=backward) for forward, backward in times]


def test_two_stages_by_hand():
    # Stage 0: F0 0-1, F1 1-2, B0 8-9, F2 9-10, B1 15-16, B2 22-23.
    # Stage 1: F0 1-4, B0 4-8, F1 8-11, B1 11-15, F2 15-18, B2 18-22.
    assert step_time(stages((1, 1), (3, 4)), microbatches=3) == 23
    # Stage 0: F0 0-3, F1 3-6, B0 6-10, F2 10-13, B1 13-17, B2 17-21.
    # Stage 1: F0 3-4, B0 4-5, F1 6-7, B1 7-8, F2 13-14, B2 14-15.
    assert step_time(stages((3, 4), (1, 1)), microbatches=3) == 21


@pytest.mark.parametrize("microbatches", [1, 2, 7, 32])
@pytest.mark.parametrize("pp", [1, 2, 5, 8])
def test_the_bubble_of_equal_stages(pp, microbatches):
    found = step_time([BOTH] * pp, microbatches=microbatches)
    assert found / (microbatches * 3) - 1 == pytest.approx((pp - 1) / microbatches)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("pp", [2, 4])
def test_the_bubble_of_virtual_stages(pp, chunks):
    pipeline = Pipeline(stages=pp, stage=0, chunks=chunks, group=pp)
    found = step_time([BOTH] * (pp * chunks), microbatches=2 * pp, pipeline=pipeline)
    assert found == (2 * pp * chunks + pp - 1) * 3


def test_encoders_side_by_side_cost_as_much_as_the_longest():
    """Two stages and one before three: figure 4(a) of the MIMO paper, at 24 microbatches."""
    assert step_time([BOTH] * 3, microbatches=24, encoders=[[BOTH] * 2, [BOTH]]) == 84
    slow = stages((5, 5))
    alone = step_time([BOTH] * 3, microbatches=24, encoders=[slow])
    assert step_time([BOTH] * 3, microbatches=24, encoders=[[BOTH], slow]) == alone
    assert step_time([BOTH] * 3, microbatches=24, encoders=[slow, [BOTH]]) == alone
