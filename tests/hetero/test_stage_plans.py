"""Plans of an encoder's pipeline stages: each hands on what the next takes, and no rank hangs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import DECODER, decoder_acts, finish

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
from loongplug.hetero.pass_order import Pipeline, ahead, warmup
from loongplug.hetero.policies import apart
from loongplug.simulate.programs import Act, Build, Post, Wait

pytestmark = pytest.mark.quick


def step_of(
    stage: int, stages: int, *, units: int, in_front: int, trains: tuple[bool, ...]
) -> EncoderStep:
    """Of a stage, where the stages' own parameters train or not."""
    return EncoderStep(
        encoder_replicas=((0,),) * units,
        replicas=1,
        replica=0,
        consumes=False,
        training=True,
        trains=any(trains[: stage + 1]),
        trains_before=any(trains[:stage]),
        last_stage=False,
        warmup=warmup(ahead=in_front, stages=stages, stage=stage),
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


def test_a_replica_without_samples_encodes_a_blank_on_every_stage() -> None:
    for stage in range(2):
        step = replace(step_of(stage, 2, units=1, in_front=1, trains=ALL), encoder_replicas=())
        assert operations(apart(step)) == [
            Encode(pieces=()),
            Backward(pieces=(), more=False),
        ]


def acts(build: Build, stage: int, plan: StepPlan, *, most: int, name: str) -> Iterator[Act]:
    """What a stage of the encoder exchanges.

    A send of features and states waits for that of ``most`` microbatches before, one of gradients
    for nothing: its receive is posted long before.
    """
    own = name, stage
    for each in operations(plan):
        if not isinstance(each, Receive | Send):
            continue
        sends, what, other = isinstance(each, Send), each.what, DECODER
        if what in (Cargo.STATES, Cargo.STATE_GRADIENTS):
            other = name, stage + (1 if sends != what.back else -1)
        way = (own, other) if sends else (other, own)
        message = build.message(way, each.piece, eager=False)
        yield Post(((message, sends),))
        if not sends:
            yield Wait(((message, sends),))
        elif not what.back and each.piece >= most:
            late = build.message(way, each.piece - most, eager=False)
            yield Wait(((late, sends),))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("decoder", [1, 2, 3])
@pytest.mark.parametrize(
    "eyes", [ALL, ALL[:2], (False, True, True), (False, False, True), (False,) * 3]
)
@pytest.mark.parametrize("ears", [True, False])
def test_no_rank_waits_for_ever(
    eyes: tuple[bool, ...], ears: bool, decoder: int, chunks: int
) -> None:
    """Two or three stages that see, one that hears, beside Megatron's schedule of the decoder.

    Some train; what does not is held by the bound on what is sent. Where all do, fewer forwards
    ahead than the least hang.
    """
    if chunks > 1 and decoder == 1:
        return
    microbatches = 4 * decoder
    in_front = ahead(pipeline=decoder, virtual=chunks > 1)
    pipeline = Pipeline(stages=decoder, stage=0, chunks=chunks, group=decoder)
    encoders = {"eyes": eyes, "ears": (ears,)}

    def finishes(most: int | None = None, *, less: int = 0) -> bool:
        """With the bound of a run or another one; ``less`` forwards ahead on the first stage."""
        build = Build()
        sources = [(name, len(trains) - 1) for name, trains in encoders.items()]
        found = decoder_acts(build, pipeline, microbatches, sources=sources, eager=False)
        for name, trains in encoders.items():
            for stage in range(len(trains)):
                step = step_of(
                    stage, len(trains), units=microbatches, in_front=in_front, trains=trains
                )
                if (name, stage) == ("eyes", 0):
                    step = replace(step, warmup=step.warmup - less)
                own = 1 + warmup(ahead=in_front, stages=len(trains), stage=stage)
                bound = own if most is None else most
                found.append(acts(build, stage, apart(step), most=bound, name=name))
        return finish(build.programs([[*each] for each in found]))

    assert finishes()
    assert finishes(0)  # each send waits for its own receive
    assert not finishes(-1)  # for one that nothing was sent for yet
    assert finishes(less=2) is not all(eyes)
