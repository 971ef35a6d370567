"""The clock of 1F1B: against steps drawn by hand, formulas, and published rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_partitions import MICROBATCHES, TABLE_3, TABLE_10, TABLE_11

from loongplug.hetero.pipeline_graph import GraphModule
from loongplug.partition import clock
from loongplug.partition.clock import StageTime

pytestmark = pytest.mark.quick

BOTH = StageTime(forward=1, backward=2)


def step_time(decoder, *, microbatches, encoders=()):
    """Of encoders side by side that lead into a decoder."""
    times = {**{f"encoder {number}": each for number, each in enumerate(encoders)}, "text": decoder}
    modules = [
        GraphModule(name=name, stages=len(each), into=None if name == "text" else "text")
        for name, each in times.items()
    ]
    return clock.step_time(modules, times, microbatches=microbatches)


def stages(*times):
    return [StageTime(forward=forward, backward=backward) for forward, backward in times]


def test_one_stage_waits_for_nobody():
    assert step_time(stages((2, 3)), microbatches=4) == 4 * 5


def test_two_stages_by_hand():
    # Stage 0: F0 0-1, F1 1-2, B0 8-9, F2 9-10, B1 15-16, B2 22-23.
    # Stage 1: F0 1-4, B0 4-8, F1 8-11, B1 11-15, F2 15-18, B2 18-22.
    assert step_time(stages((1, 1), (3, 4)), microbatches=3) == 23
    # Stage 0: F0 0-3, F1 3-6, B0 6-10, F2 10-13, B1 13-17, B2 17-21.
    # Stage 1: F0 3-4, B0 4-5, F1 6-7, B1 7-8, F2 13-14, B2 14-15.
    assert step_time(stages((3, 4), (1, 1)), microbatches=3) == 21


def test_a_stage_goes_as_far_ahead_as_1f1b_does():
    # Stage 0: F0 0-10, F1 10-20, B0 20-21 (there at 12), F2 21-31, B1 31-32, B2 33-34.
    # All forwards first would take 33, none ahead 37.
    assert step_time(stages((10, 1), (1, 1)), microbatches=3) == 34


@pytest.mark.parametrize("microbatches", [1, 2, 7, 32])
@pytest.mark.parametrize("pp", [1, 2, 5, 8])
def test_the_bubble_of_equal_stages(pp, microbatches):
    found = step_time([BOTH] * pp, microbatches=microbatches)
    assert found / (microbatches * 3) - 1 == pytest.approx((pp - 1) / microbatches)


def test_an_encoder_of_its_own_is_a_stage_more():
    for pp in (1, 3):
        alone = step_time([BOTH] * (pp + 2), microbatches=5)
        assert step_time([BOTH] * pp, microbatches=5, encoders=[[BOTH] * 2]) == alone


def test_encoders_side_by_side_cost_as_much_as_the_longest():
    """Two stages and one before three: figure 4(a) of the MIMO paper, at 24 microbatches."""
    assert step_time([BOTH] * 3, microbatches=24, encoders=[[BOTH] * 2, [BOTH]]) == 84
    slow = stages((5, 5))
    alone = step_time([BOTH] * 3, microbatches=24, encoders=[slow])
    assert step_time([BOTH] * 3, microbatches=24, encoders=[[BOTH], slow]) == alone
    assert step_time([BOTH] * 3, microbatches=24, encoders=[slow, [BOTH]]) == alone


def test_the_decoder_waits_for_all_encoders_and_they_for_it():
    # F: the slow encoder's at 5, the decoder's 5-6, its backward 6-8, both encoders' behind it.
    found = step_time(stages((1, 2)), microbatches=1, encoders=[stages((5, 1)), stages((1, 7))])
    assert found == 5 + 1 + 2 + 7


TIME = st.integers(0, 5)
ROW = st.lists(st.builds(StageTime, forward=TIME, backward=TIME), min_size=1, max_size=4)


@given(ROW, st.lists(ROW, max_size=3), st.integers(1, 9))
def test_no_step_is_shorter_than_the_busiest_stage_or_one_microbatch_s_way(
    decoder, encoders, microbatches
):
    found = step_time(decoder, microbatches=microbatches, encoders=encoders)

    def whole(row):
        return sum(each.forward + each.backward for each in row)

    busiest = max(whole([stage]) for row in (decoder, *encoders) for stage in row)
    one = step_time(decoder, microbatches=1, encoders=encoders)
    forward = max([0, *(sum(each.forward for each in row) for row in encoders)])
    backward = max([0, *(sum(each.backward for each in row) for row in encoders)])
    assert one == whole(decoder) + forward + backward
    assert found >= max(one, microbatches * busiest)
    assert found <= microbatches * one


def gain(row):
    """How many times the rate of a GPU is that of the unaware split."""
    times = []
    for timed, (encoder, decoder) in (
        (row.aware, row.stages),
        (row.unaware, row.inferred()),
    ):
        step = step_time(
            stages(timed.decoder) * decoder,
            microbatches=MICROBATCHES,
            encoders=[stages(timed.encoder) * encoder],
        )
        times.append(step * (encoder + decoder))
    return times[1] / times[0]


def test_published_stage_times_give_the_published_gains():
    """Within 12 % of each of table 3, and the right one of faster, alike and slower in most."""
    found = {name: gain(row) for name, row in TABLE_3.items()}
    assert {name: round(each, 2) for name, each in found.items()} == {
        "VLM-S": 1.29,
        "VLM-M": 1.27,
        "ALM-S": 1.00,
        "ALM-M": 1.15,
        "VLM-L": 1.70,
        "ALM-L": 1.30,
    }
    for name, row in TABLE_3.items():
        assert found[name] == pytest.approx(row.aware.rate / row.unaware.rate, rel=0.12)

    def sign(times):
        return 0 if abs(times - 1) < 0.05 else 1 if times > 1 else -1

    rows = [*TABLE_3.values(), *TABLE_10.values(), *TABLE_11.values()]
    right = [sign(gain(row)) == sign(row.aware.rate / row.unaware.rate) for row in rows]
    assert sum(right) == 14
