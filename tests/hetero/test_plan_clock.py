"""The clock of full separation: by hand, by formulas, and against the partition's clock."""

from dataclasses import replace

import pytest
from hypothesis import given
from streamed_steps import (
    FORWARD,
    busiest,
    even,
    separated,
    separated_end,
    simulate,
    steps,
)

from loongplug.hetero.operations import EncoderWork
from loongplug.hetero.step_programs import (
    Name,
    PassCosts,
    PieceCost,
    Step,
    plan_time,
)
from loongplug.partition.clock import StageTime, step_time

pytestmark = pytest.mark.quick

# Two stages, two microbatches of one piece each, a replica on each stage.
SMALL = Step(
    pieces=((PieceCost(3, 5),),) * 2,
    replicas=(0, 1),
    group=2,
    forward=(1, 1),
    backward=(2, 2),
)
FROZEN = PassCosts(trains=False)


def work(*each: tuple[int, bool, int]) -> tuple[EncoderWork[Name], ...]:
    return tuple(EncoderWork(before, forward, ((unit, 0),)) for before, forward, unit in each)


def test_by_hand() -> None:
    # Stage 0: encodes 0 0-3, F0 3-4, F1 4-5, B0 7-9, encodes back 0 9-14, B1 14-16.
    # Stage 1: encodes 1 0-3, F0 4-5, B0 5-7, F1 7-8, B1 8-10, waits for B1, encodes back 1 16-21.
    plan = (work((0, True, 0), (3, False, 0)), work((0, True, 1), (4, False, 1)))
    times = simulate(SMALL, plan)
    assert times is not None
    assert times.step == 21
    assert times.idle == (21 - 14, 21 - 14)
    assert times.encoded == {(0, 0): 3, (1, 0): 3}
    assert times.used == {0: 4, 1: 5}
    assert times.features_held() == 2
    frozen = simulate(
        replace(SMALL, encoder=FROZEN),
        (work((0, True, 0)), work((0, True, 1))),
    )
    assert frozen is not None
    assert frozen.step == 3 + 9


def test_pieces_in_one_pass_by_hand() -> None:
    """Features come with the pass's last piece, a backward waits for the last gradient."""
    # Stage 0: encodes both 0-7, F0 7-8, F1 8-9, B0 11-13, B1 14-16, encodes both back 16-28.
    # Stage 1: F0 8-9, B0 9-11, F1 11-12, B1 12-14.
    step = replace(SMALL, encoder=PassCosts(each=PieceCost(1, 2)))
    both = ((0, 0), (1, 0))
    work = (EncoderWork(0, True, both), EncoderWork(4, False, both))
    times = simulate(step, (work, ()))
    assert times is not None
    assert times.step == 28
    assert times.idle == (28 - 19 - 6, 28 - 6)
    assert times.encoded == {(0, 0): 7, (1, 0): 7}
    too_early = (work[0], EncoderWork(3, False, both))
    assert simulate(step, (too_early, ())) is None
    apart = tuple(EncoderWork(one.before, one.forward, (name,)) for one in work for name in both)
    slower = simulate(step, (apart, ()))
    assert slower is not None
    assert slower.step == 28 + 1 + 2  # both before the first pass
    assert slower.idle == (31 - 22 - 6, 31 - 6)


@pytest.mark.parametrize(
    "circle",
    [
        (work((4, True, 0)), work((0, True, 1))),  # its features are taken before
        (work((0, True, 0), (2, False, 0)), work((0, True, 1))),  # its gradient comes after
        (work((0, True, 0)), work((0, True, 1), (1, False, 0))),
    ],
)
def test_ranks_that_wait_in_a_circle_are_found(
    circle: tuple[tuple[EncoderWork[Name], ...], ...],
) -> None:
    assert simulate(SMALL, circle) is None


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [3, 16])
def test_separated_by_formula(stages: int, microbatches: int) -> None:
    """The decoder's schedule with its bubble, and the encoders' work beside it."""
    step = even(stages, percent=50, microbatches=microbatches, count=8)
    decoder = (microbatches + stages - 1) * 3 * FORWARD
    assert separated_end(step) == decoder + microbatches * 3 * FORWARD


def test_interleaving_divides_the_bubble() -> None:
    step = even(4, percent=50, chunks=2)
    bubble = 3 * 3 * FORWARD // 2
    assert separated_end(step) == busiest(step) + bubble


@given(steps().filter(lambda step: len(step.forward) == len(step.passes)))
def test_the_decoder_alone(step: Step) -> None:
    """As the partition's clock has it."""
    microbatches = len(step.pieces)
    alone = replace(step, pieces=((),) * microbatches)
    times = simulate(alone, ((),) * len(step.replicas))
    assert times is not None
    stages = [
        StageTime(forward=forward, backward=backward)
        for forward, backward in zip(step.forward, step.backward, strict=True)
    ]
    assert times.step == step_time(stages, microbatches=microbatches)


@given(steps())
def test_a_step_that_is_sent_is_no_shorter(step: Step) -> None:
    """Sends wait for their receives; even stages wait no longer for that."""
    if len(step.forward) > len(step.passes) and len(step.pieces) % len(step.passes):
        return
    plan = separated(step)
    free = plan_time(step, plan)
    assert free is not None
    assert separated_end(step) >= free


def test_uneven_virtual_stages_are_held_up_by_what_they_send() -> None:
    step = Step(
        pieces=((),) * 4,
        replicas=(0, 1),
        group=2,
        forward=(2, 1, 1, 9),
        backward=(9, 1, 9, 1),
    )
    plan = separated(step)
    assert plan_time(step, plan) == 91
    assert separated_end(step) == 92
