"""Plans of all ranks of a model replica, in the order of their schedules."""

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate, chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongplug.hetero.operations import (
    BEGIN,
    END,
    Backward,
    Encode,
    EncoderStep,
    EncoderWork,
    Event,
    Exchange,
    Kept,
    Move,
    Operation,
    Receive,
    Send,
    StepPlan,
    Stream,
    To,
    Weights,
    When,
    before_pass,
    forward,
    gradient,
)
from loongplug.hetero.policies import apart, group_ahead, inline, separated, streamed
from loongplug.hetero.recorded_schedule import Pipeline, events

pytestmark = pytest.mark.quick

MOVABLE = (Kept.FEATURES, Kept.ACTIVATIONS, Kept.STATE)


@st.composite
def steps(draw: st.DrawFn, *, everywhere: bool) -> list[tuple[EncoderStep, Pipeline]]:
    """One step as the ranks of a model replica see it; ``everywhere``: all stages encode."""
    stages = draw(st.integers(1, 3))
    replicas = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 2)) if stages > 1 else 1
    count = draw(st.integers(1, 6))
    if chunks > 1:
        count = stages * draw(st.integers(1, 3))
    some = st.lists(st.integers(0, replicas - 1), min_size=1, unique=True).map(tuple)
    if everywhere:
        encoder_replicas = tuple(draw(some) for _ in range(count))
    else:
        # What is left at the end may be shared.
        left = count % replicas
        in_turn = tuple((number % replicas,) for number in range(count - left))
        encoder_replicas = (*in_turn, *(draw(some) for _ in range(left)))
    training = draw(st.booleans())
    trains = training and draw(st.booleans())
    on_host = frozenset(draw(st.sets(st.sampled_from(MOVABLE)))) if everywhere else frozenset()
    rows = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count).map(tuple))
    joined_rows = draw(st.integers(1, 12))
    found = []
    for stage in range(stages):
        for replica in range(replicas):
            encodes = everywhere or stage == 0
            step = EncoderStep(
                encoder_replicas=encoder_replicas,
                replicas=replicas,
                replica=replica if encodes else None,
                consumes=stage == 0,
                training=training,
                trains=trains,
                last_stage=stage == stages - 1,
                on_host=on_host,
                rows=rows,
                joined_rows=joined_rows,
            )
            pipeline = Pipeline(stages=stages, stage=stage, chunks=chunks, group=stages)
            found.append((step, pipeline))
    return found


def in_order(plan: StepPlan, step: EncoderStep, pipeline: Pipeline) -> list[Operation]:
    """A rank's operations as its schedule comes to them, which does to all of the plan."""
    never = set() if step.training else {Event.BACKWARD, Event.GRADIENT}
    never |= set() if step.consumes else {Event.GRADIENT}
    passed = [
        each
        for each in events(pipeline, len(step.encoder_replicas))
        if isinstance(each, When) and each.event not in never
    ]
    assert plan.keys() <= {*passed}, f"nobody comes to {plan.keys() - {*passed}}"
    return [each for when in passed for each in plan.get(when, ())]


def collectives(plan: StepPlan, step: EncoderStep, pipeline: Pipeline) -> list[Operation]:
    """What a rank enters together with others, in its order.

    Each piece goes forward once, and back where something trains, with one reduction behind all.
    What moves to the host leaves and is let go of, and is sent for before it is used.
    """
    done = in_order(plan, step, pipeline)
    forwards = [each.pieces for each in done if isinstance(each, Encode)]
    backwards = [each for each in done if isinstance(each, Backward)]
    mine = step.mine(step.units)
    if step.stream is not None:
        mine = sorted(piece for x in step.stream.work if x.forward for piece in x.pieces)
    assert sorted(chain(*forwards)) == mine
    assert sorted(x.pieces for x in backwards) == (sorted(forwards) if step.trains else [])
    assert not backwards or backwards[-1].more == (Weights(gather=False) in done)
    moves = defaultdict[tuple[Kept, int | None], list[To]](list)
    for each in done:
        for piece in (each.pieces or (None,)) if isinstance(each, Move) else ():
            moves[each.what, piece].append(each.to)
    # Features leave within their exchange.
    assert all(to == [*To][2 * (what is Kept.FEATURES) :] for (what, _), to in moves.items()), moves
    return [each for each in done if isinstance(each, Exchange | Weights)]


@given(steps(everywhere=True))
def test_separated(ranks: list[tuple[EncoderStep, Pipeline]]) -> None:
    """All ranks enter the same exchanges in the same order."""
    entered = [collectives(separated(step), step, pipeline) for step, pipeline in ranks]
    assert all(each == entered[0] for each in entered)


@given(steps(everywhere=False))
def test_group_ahead(ranks: list[tuple[EncoderStep, Pipeline]]) -> None:
    """All ranks of the first stage do; the others have nothing to do."""
    for step, pipeline in ranks:
        plan = group_ahead(step)
        if step.replica is None:
            assert not plan
            continue
        first = collectives(group_ahead(ranks[0][0]), *ranks[0])
        assert collectives(plan, step, pipeline) == first


@st.composite
def steps_streamed(draw: st.DrawFn) -> list[tuple[EncoderStep, Pipeline]]:
    """One step that streams; pieces are encoded, and go backward, whenever it comes."""
    stages, lanes = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    chunks = draw(st.integers(1, 2)) if stages > 1 else 1
    count = draw(st.integers(1, 5)) if chunks == 1 else stages * draw(st.integers(1, 2))
    owners = draw(
        st.lists(
            st.lists(st.integers(0, stages * lanes - 1), max_size=3),
            min_size=count,
            max_size=count,
        )
    )
    ends = [*accumulate(map(len, owners), initial=0)]
    trains, on_host = draw(st.booleans()), draw(st.sampled_from([(), (Kept.ACTIVATIONS,)]))
    found = []
    for replica in range(stages * lanes):
        mine = [n for n, owner in enumerate(x for unit in owners for x in unit) if owner == replica]
        stream = Stream(
            work=draw(works(mine, passes=2 * count * chunks, trains=trains)),
            pieces=tuple(range(first, stop) for first, stop in pairwise(ends)),
        )
        stage = replica // lanes
        step = EncoderStep(
            encoder_replicas=tuple(tuple(sorted({*unit})) or (0,) for unit in owners),
            replicas=stages * lanes,
            replica=replica,
            consumes=stage == 0,
            training=True,
            trains=trains,
            last_stage=stage == stages - 1,
            on_host=frozenset(on_host),
            stream=stream,
        )
        found.append((step, Pipeline(stages=stages, stage=stage, chunks=chunks, group=stages)))
    return found


@st.composite
def works(
    draw: st.DrawFn, pieces: list[int], *, passes: int, trains: bool
) -> tuple[EncoderWork[int], ...]:
    """Of one replica: each of its pieces goes forward, alone or with the next, and later back."""
    moments = []
    while pieces:
        size = draw(st.integers(1, 2))
        together, pieces = tuple(pieces[:size]), pieces[size:]
        begin = draw(st.integers(0, passes))
        moments.append((begin, True, together))
        if trains:
            moments.append((draw(st.integers(begin, passes)), False, together))
    moments.sort(key=lambda each: (each[0], not each[1]))
    return tuple(EncoderWork(*each) for each in moments)


def at_once(ranks: list[tuple[EncoderStep, Pipeline]]) -> list[tuple[EncoderStep, Pipeline]]:
    """A step that could stream and does not; state and features stay where such steps may be."""
    return [
        (replace(step, on_host=step.on_host & {Kept.ACTIVATIONS}), pipeline)
        for step, pipeline in ranks
    ]


@given(st.one_of(steps_streamed(), steps(everywhere=True).map(at_once)))
def test_streamed(ranks: list[tuple[EncoderStep, Pipeline]]) -> None:
    """Whatever a rank does meanwhile, all enter the same collectives around it."""
    entered = [collectives(streamed(step), step, pipeline) for step, pipeline in ranks]
    assert all(each == entered[0] for each in entered)
    step, _ = ranks[0]
    around: list[Operation] = [Weights(gather=True), Weights(gather=False)] if step.trains else []
    assert [each for each in entered[0] if each in around] == around
    for step, _ in ranks:
        if step.stream is not None:
            assert entered[0] == around
            plan = streamed(step).items()
            outside = {when for when, several in plan for each in several if each in around}
            assert outside <= {BEGIN, END}
            assert worked(streamed(step)) == planned(step.stream)


Worked = dict[When, list[tuple[bool, tuple[int, ...]]]]  # forwards and backwards of pieces


def worked(plan: StepPlan) -> Worked:
    found: Worked = {}
    for when, operations in plan.items():
        for each in operations:
            if isinstance(each, Encode | Backward):
                found.setdefault(when, []).append((isinstance(each, Encode), each.pieces))
    return found


def planned(stream: Stream) -> Worked:
    found: Worked = {}
    for each in stream.work:
        found.setdefault(before_pass(each.before), []).append((each.forward, each.pieces))
    return found


def told(plan: StepPlan) -> list[str]:
    """An encoder's operations in a few letters; the last backward, which reduces, in capitals."""
    words = []
    for each in plan.get(BEGIN, ()):
        match each:
            case Encode(pieces=pieces):
                words.append(f"encode {[*pieces]}")
            case Send(piece=piece):
                words.append(f"send {piece}")
            case Receive(piece=piece):
                words.append(f"wait {piece}")
            case Backward(pieces=pieces, more=more):
                words.append(f"{'back' if more else 'BACK'} {[*pieces]}")
    return words


ENCODES = EncoderStep(
    encoder_replicas=((0,),) * 6,
    replicas=1,
    replica=0,
    consumes=False,
    training=True,
    trains=True,
    last_stage=False,
    pieces=2,
    forwards=(3, 3, 3),
)


def test_an_encoder_apart_works_ahead_by_so_many_forwards() -> None:
    """Three microbatches of two pieces: two ahead, then one forward and one backward in turn."""
    pieces = [f"encode [{n}],send {n}" for n in range(6)]
    back = [f"wait {n},{'BACK' if n == 5 else 'back'} [{n}]" for n in range(6)]
    expected = ",".join([*pieces, *back])  # the third goes ahead of the first gradient
    assert told(apart(ENCODES)) == expected.split(",")
    one_ahead = [*pieces[:4], *back[:2], *pieces[4:], *back[2:]]
    assert told(apart(replace(ENCODES, forwards=(2, 3, 3)))) == ",".join(one_ahead).split(",")
    assert apart(ENCODES).keys() == {BEGIN}  # there is no schedule to wait for


def test_an_encoder_apart_that_has_nothing_to_learn_or_to_encode() -> None:
    frozen = apart(replace(ENCODES, trains=False))
    assert told(frozen) == [word for n in range(6) for word in (f"encode [{n}]", f"send {n}")]
    none = replace(ENCODES, encoder_replicas=(), pieces=1)
    assert told(apart(none)) == ["encode []", "BACK []"]
    assert not apart(replace(none, trains=False))


def test_inline_is_of_the_stages_that_consume() -> None:
    step = EncoderStep(
        encoder_replicas=((0,), (0,)),
        replicas=1,
        replica=0,
        consumes=True,
        training=True,
        trains=True,
        last_stage=False,
    )
    there = {forward(unit): (Encode(pieces=(unit,)),) for unit in (0, 1)}
    back = {gradient(n): (Backward(pieces=(n,), more=n == 0),) for n in (0, 1)}
    assert inline(step) == there | back
    assert inline(replace(step, trains=False)) == there
    assert not inline(replace(step, consumes=False))
