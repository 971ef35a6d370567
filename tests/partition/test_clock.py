"""The partition's clock: against steps drawn by hand, formulas, and published rates."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_partitions import MICROBATCHES, TABLE_3, TABLE_10, TABLE_11

from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.recorded_schedule import turns
from loongplug.partition.clock import StageTime, step_time

pytestmark = pytest.mark.quick

BOTH = StageTime(forward=1, backward=2)


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


TIME = st.integers(0, 5)
TIMES = st.builds(StageTime, forward=TIME, backward=TIME)
ROW = st.lists(TIMES, min_size=1, max_size=4)


def one_by_one(decoder, *, microbatches, encoders, pipeline):
    """A step, pass by pass: each rank does its next one as soon as what that needs is done."""
    last, stages = len(decoder) - 1, pipeline.stages
    times = {"text": decoder, **dict(enumerate(encoders))}
    left = [
        [
            ("text", one.chunk * stages + stage, forward, one.microbatch)
            for turn in turns(replace(pipeline, stage=stage), microbatches)
            for forward, one in ((True, turn.forward), (False, turn.backward))
            if one is not None
        ]
        for stage in range(stages)
    ]
    first = 2 * stages if pipeline.chunks > 1 else stages
    for name, row in enumerate(encoders):
        for stage in range(len(row)):
            ahead = min(microbatches, first + len(row) - 1 - stage)
            passes = [(2 * (number + ahead), False, number) for number in range(microbatches)]
            passes += [(2 * number - 1, True, number) for number in range(microbatches)]
            left.append([(name, stage, forward, number) for _, forward, number in sorted(passes)])

    def needs(name, place, forward, number):
        if forward and place:
            return [(name, place - 1, True, number)]
        if forward:
            ends = enumerate(encoders) if name == "text" else ()
            return [(each, len(row) - 1, True, number) for each, row in ends]
        if place < len(times[name]) - 1:
            return [(name, place + 1, False, number)]
        return [("text", last, True, number) if name == "text" else ("text", 0, False, number)]

    ends, free = {}, [0 for _ in left]
    while any(left):
        for rank, row in enumerate(left):
            while row and all(each in ends for each in needs(*row[0])):
                name, place, forward, _ = one = row.pop(0)
                time = times[name][place]
                begin = max([free[rank], *(ends[each] for each in needs(*one))])
                free[rank] = ends[one] = begin + (time.forward if forward else time.backward)
    return max(free)


@given(st.data())
def test_virtual_stages_and_encoders_step_pass_by_pass(data):
    stages, chunks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    chunks = chunks if stages > 1 else 1
    pipeline = Pipeline(stages=stages, stage=0, chunks=chunks, group=stages)
    places = stages * chunks
    case = {
        "decoder": data.draw(st.lists(TIMES, min_size=places, max_size=places)),
        "encoders": data.draw(st.lists(ROW, max_size=2)),
        "microbatches": data.draw(st.integers(1, 3)) * (stages if chunks > 1 else 1),
        "pipeline": pipeline,
    }
    assert step_time(**case) == one_by_one(**case)


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
