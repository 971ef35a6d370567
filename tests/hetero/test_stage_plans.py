"""Plans of an encoder's pipeline stages: each hands on what the next takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongplug.hetero.encoder_steps import EncoderStep
from loongplug.hetero.operations import (
    BEGIN,
    Backward,
    Cargo,
    Encode,
    Operation,
    Receive,
    Send,
    StepPlan,
)
from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.policies import apart
from loongplug.hetero.recorded_schedule import forwards_first

pytestmark = pytest.mark.quick


def step_of(
    stage: int, stages: int, *, units: int, in_front: int, trains: tuple[bool, ...]
) -> EncoderStep:
    """Of a stage, where the stages' own parameters train or not."""
    decoder = Pipeline(stages=in_front, stage=0, chunks=1, group=in_front)
    return EncoderStep(
        encoder_replicas=((0,),) * units,
        replicas=1,
        replica=0,
        consumes=False,
        training=True,
        trains=any(trains[: stage + 1]),
        trains_before=any(trains[:stage]),
        last_stage=False,
        forwards=forwards_first(decoder, units, behind=stages - 1 - stage),
        stage=stage,
        stages=stages,
    )


def operations(plan: StepPlan) -> list[Operation]:
    assert plan.keys() <= {BEGIN}
    return [*plan.get(BEGIN, ())]


def pieces(plan: StepPlan, kind: type, what: Cargo) -> list[int]:
    """Those that are sent or received."""
    return [each.piece for each in operations(plan) if isinstance(each, kind) and each.what is what]


ALL = (True, True, True)


def test_the_first_stage_is_further_ahead_than_the_last() -> None:
    """Two stages before a decoder without a pipeline: two forwards ahead, then one."""
    first, last = (
        operations(apart(step_of(stage, 2, units=3, in_front=1, trains=ALL))) for stage in (0, 1)
    )

    def forwards(piece: int, made: Cargo) -> tuple[Operation, ...]:
        return Encode(pieces=(piece,)), Send(what=made, piece=piece)

    def backwards(piece: int, came: Cargo) -> tuple[Operation, ...]:
        return Receive(what=came, piece=piece), Backward(pieces=(piece,), more=piece < 2)

    assert first == [
        *(each for piece in range(3) for each in forwards(piece, Cargo.STATES)),
        *(each for piece in range(3) for each in backwards(piece, Cargo.STATE_GRADIENTS)),
    ]

    def there(piece: int) -> tuple[Operation, ...]:
        return Receive(what=Cargo.STATES, piece=piece), *forwards(piece, Cargo.FEATURES)

    def back(piece: int) -> tuple[Operation, ...]:
        given = Send(what=Cargo.STATE_GRADIENTS, piece=piece)
        return *backwards(piece, Cargo.GRADIENTS), given

    assert last == [*there(0), *there(1), *back(0), *there(2), *back(1), *back(2)]


@given(
    st.lists(st.booleans(), min_size=2, max_size=4),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_what_one_stage_gives_the_next_takes(trains: list[bool], units: int, in_front: int) -> None:
    """In one order, each unit once, and gradients as far as something before trains."""
    stages = len(trains)
    plans = [
        apart(step_of(stage, stages, units=units, in_front=in_front, trains=tuple(trains)))
        for stage in range(stages)
    ]
    for stage in range(1, stages):
        before, own = plans[stage - 1], plans[stage]
        given, taken = pieces(before, Send, Cargo.STATES), pieces(own, Receive, Cargo.STATES)
        assert given == taken == [*range(units)]
        back = [*range(units)] if any(trains[:stage]) else []
        returned = pieces(own, Send, Cargo.STATE_GRADIENTS)
        assert pieces(before, Receive, Cargo.STATE_GRADIENTS) == returned == back
        gone = [each.pieces for each in operations(before) if isinstance(each, Backward)]
        assert gone == [(piece,) for piece in back]
    assert not pieces(plans[0], Receive, Cargo.STATES)
    assert not pieces(plans[0], Send, Cargo.STATE_GRADIENTS)
    assert not pieces(plans[-1], Send, Cargo.STATES)
