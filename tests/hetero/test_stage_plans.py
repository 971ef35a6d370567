"""Plans of an encoder's pipeline stages: each hands on what the next takes, and no rank hangs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import Exchange, Move, decoder_programs, finish

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
from loongplug.hetero.pipeline_graph import ahead, in_flight, warmup
from loongplug.hetero.policies import EncoderStep, apart

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
        warmup=warmup(microbatches=units, ahead=in_front, stages=stages, stage=stage),
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


def program(
    stage: int, plan: StepPlan, *, most: int | None = None, name: str = "eyes"
) -> list[Exchange]:
    """What a stage of the encoder exchanges.

    No send waits, or one of features and states for that of ``most`` microbatches before; receives
    of gradients are posted long before these are sent.
    """
    found = []
    own, before, behind = ((name, each) for each in (stage, stage - 1, stage + 1))
    bound = {} if most is None else {"waits": True, "before": most}
    decoder = ("text", 0)
    for each in operations(plan):
        match each:
            case Receive(what=Cargo.STATES):
                move = Move(sends=False, source=before, target=own)
            case Send(what=Cargo.STATES):
                move = Move(sends=True, source=own, target=behind, **bound)
            case Receive(what=Cargo.STATE_GRADIENTS):
                move = Move(sends=False, source=behind, target=own)
            case Send(what=Cargo.STATE_GRADIENTS):
                move = Move(sends=True, source=own, target=before)
            case Send():
                move = Move(sends=True, source=own, target=decoder, **bound)
            case Receive():
                move = Move(sends=False, source=decoder, target=own)
            case _:
                continue
        found.append((move,))
    return found


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("decoder", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3])
def test_no_rank_waits_for_ever(stages: int, decoder: int, chunks: int) -> None:
    """Megatron's schedule on the decoder's ranks; fewer forwards ahead than the least hang."""
    if chunks > 1 and decoder == 1:
        return
    microbatches = 4 * decoder
    in_front = ahead(pipeline=decoder, virtual=chunks > 1)
    pipeline = Pipeline(stages=decoder, stage=0, chunks=chunks, group=decoder)

    def finishes(counts: dict[int, int]) -> bool:
        programs = decoder_programs(
            "text",
            pipeline=pipeline,
            microbatches=microbatches,
            sources=[("eyes", stages - 1)],
        )
        for stage in range(stages):
            step = step_of(
                stage, stages, units=microbatches, in_front=in_front, trains=(True,) * stages
            )
            less = counts.get(stage, 0)
            programs["eyes", stage] = program(
                stage, apart(replace(step, warmup=step.warmup - less))
            )
        return finish(programs)

    assert finishes({})
    assert not finishes({0: 2})


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("decoder", [1, 2, 3])
@pytest.mark.parametrize("eyes", [ALL, (False, True, True), (False, False, True), (False,) * 3])
@pytest.mark.parametrize("ears", [True, False])
def test_no_rank_waits_for_ever_by_the_bound_on_what_is_sent(
    eyes: tuple[bool, ...], ears: bool, decoder: int, chunks: int
) -> None:
    """Three stages that see, one that hears: some train, and what does not is held by the bound."""
    if chunks > 1 and decoder == 1:
        return
    microbatches = 4 * decoder
    in_front = ahead(pipeline=decoder, virtual=chunks > 1)
    pipeline = Pipeline(stages=decoder, stage=0, chunks=chunks, group=decoder)
    encoders = {"eyes": eyes, "ears": (ears,)}

    def finishes(most: int | None = None) -> bool:
        """With the bound of a run, or another one."""
        programs = decoder_programs(
            "text",
            pipeline=pipeline,
            microbatches=microbatches,
            sources=[(name, len(trains) - 1) for name, trains in encoders.items()],
        )
        for name, trains in encoders.items():
            for stage in range(len(trains)):
                step = step_of(
                    stage, len(trains), units=microbatches, in_front=in_front, trains=trains
                )
                own = in_flight(ahead=in_front, stages=len(trains), stage=stage)
                programs[name, stage] = program(
                    stage, apart(step), most=own if most is None else most, name=name
                )
        return finish(programs)

    assert finishes()
    assert finishes(0)  # each send waits for its own receive
    assert not finishes(-1)  # for one that nothing was sent for yet
