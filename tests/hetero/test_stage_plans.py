"""Plans of an encoder's pipeline stages: each hands on what the next takes, and no rank hangs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import Exchange, Move, decoder_programs, finish

from loongplug.hetero.operations import (
    BEGIN,
    Encode,
    EncoderBackward,
    GatherFeatures,
    GiveBack,
    HandOn,
    Operation,
    ScatterGradients,
    StepPlan,
    TakeBack,
    TakeStates,
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


def of_kind(plan: StepPlan, kind: type) -> list[int]:
    return [each.unit for each in operations(plan) if isinstance(each, kind)]


ALL = (True, True, True)


def test_the_first_stage_is_further_ahead_than_the_last() -> None:
    """Two stages before a decoder without a pipeline: two forwards ahead, then one."""
    first, last = (
        operations(apart(step_of(stage, 2, units=3, in_front=1, trains=ALL))) for stage in (0, 1)
    )
    assert first == [
        *(Encode(unit=0), HandOn(unit=0), Encode(unit=1), HandOn(unit=1)),
        *(Encode(unit=2), HandOn(unit=2), TakeBack(unit=0), EncoderBackward(unit=0, more=True)),
        *(TakeBack(unit=1), EncoderBackward(unit=1, more=True)),
        *(TakeBack(unit=2), EncoderBackward(unit=2, more=False)),
    ]
    units = [range(unit, unit + 1) for unit in range(3)]

    def there(unit: int) -> tuple[Operation, ...]:
        return TakeStates(unit=unit), Encode(unit=unit), GatherFeatures(units=units[unit])

    def back(unit: int) -> tuple[Operation, ...]:
        backward = EncoderBackward(unit=unit, more=unit < 2)
        return ScatterGradients(units=units[unit]), backward, GiveBack(unit=unit)

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
        assert of_kind(before, HandOn) == of_kind(own, TakeStates) == [*range(units)]
        back = [*range(units)] if any(trains[:stage]) else []
        assert of_kind(before, TakeBack) == of_kind(own, GiveBack) == back
        assert of_kind(before, EncoderBackward) == back
    assert not of_kind(plans[0], TakeStates)
    assert not of_kind(plans[0], GiveBack)
    assert not of_kind(plans[-1], HandOn)


def test_a_replica_without_samples_encodes_a_blank_on_every_stage() -> None:
    for stage in range(2):
        step = replace(step_of(stage, 2, units=1, in_front=1, trains=ALL), encoder_replicas=())
        assert operations(apart(step)) == [
            Encode(unit=None),
            EncoderBackward(unit=None, more=False),
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
            case TakeStates():
                move = Move(sends=False, source=before, target=own)
            case HandOn():
                move = Move(sends=True, source=own, target=behind, **bound)
            case TakeBack():
                move = Move(sends=False, source=behind, target=own)
            case GiveBack():
                move = Move(sends=True, source=own, target=before)
            case GatherFeatures():
                move = Move(sends=True, source=own, target=decoder, **bound)
            case ScatterGradients():
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
