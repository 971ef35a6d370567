"""Plans of all ranks of a model replica, walked in the order of their schedules."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongplug.hetero.operations import (
    BEGIN,
    END,
    Await,
    Encode,
    EncodeInForward,
    EncoderBackward,
    GatherFeatures,
    KeepGradient,
    Kept,
    Offload,
    Operation,
    Release,
    Reload,
    ScatterGradients,
    StepPlan,
    TakeFeatures,
    When,
    backward,
    forward,
    gradient,
)
from loongplug.hetero.pass_order import Pipeline, turns
from loongplug.hetero.policies import EncoderStep, apart, group_ahead, inline, separated

pytestmark = pytest.mark.quick

MOVABLE = (Kept.FEATURES, Kept.ACTIVATIONS, Kept.STATE)


def in_order(plan: StepPlan, step: EncoderStep, pipeline: Pipeline) -> Iterator[Operation]:
    """A rank's operations as its schedule comes to them."""
    count, passed = len(step.encoder_replicas), {BEGIN, END}
    yield from plan.get(BEGIN, ())
    for turn in turns(pipeline, count):
        events = []
        if turn.forward is not None and turn.forward.chunk == 0:
            events.append(forward(turn.forward.microbatch))
        if turn.backward is not None and turn.backward.chunk == 0 and step.training:
            events.append(backward(turn.backward.microbatch))
            if step.consumes:
                events.append(gradient(turn.backward.microbatch))
        for event in events:
            passed.add(event)
            yield from plan.get(event, ())
    yield from plan.get(END, ())
    assert plan.keys() <= passed, f"nobody comes to {plan.keys() - passed}"


@dataclass
class Walk:
    """What one rank has at a moment of its step; each operation says what it needs."""

    step: EncoderStep
    encoded: list[int | None] = field(default_factory=list)
    passes: list[tuple[int | None, ...]] = field(default_factory=list)
    collectives: list[Operation] = field(default_factory=list)
    payloads: set[int | None] = field(default_factory=set)
    features: set[int] = field(default_factory=set)  # on the device
    taken: list[int] = field(default_factory=list)
    gradients: set[int] = field(default_factory=set)  # on the device
    own: set[int | None] = field(default_factory=set)  # may go backward
    backward: list[int | None] = field(default_factory=list)
    last_more: bool = False
    movable: set[int | None] = field(default_factory=set)  # what their backward needs may leave
    away: dict[tuple[Kept, int | None], str] = field(default_factory=dict)

    def here(self, what: Kept, unit: int | None = None) -> bool:
        return (what, unit) not in self.away

    def do(self, operation: Operation) -> None:
        step = self.step
        match operation:
            case Encode(unit=unit, movable=movable, joined=joined):
                assert self.here(Kept.STATE)
                if movable:
                    assert not joined, "they would be on the device together"
                    self.movable.add(unit)
                for each in (unit, *joined):
                    assert each is None or step.replica in step.encoder_replicas[each]
                    assert each not in self.encoded
                    self.encoded.append(each)
                    self.payloads.add(each)
                self.passes.append((unit, *joined))
                self.own |= {unit} & {None}  # nobody has a gradient for it
            case GatherFeatures(units=units, to_host=to_host):
                self.collectives.append(operation)
                own = {unit for unit in units if step.replica in step.encoder_replicas[unit]}
                assert own <= self.payloads, "a unit is sent that was not encoded"
                self.payloads -= own
                if step.consumes and to_host:
                    self.away |= {(Kept.FEATURES, unit): "away" for unit in units}
                elif step.consumes:
                    self.features |= set(units)
            case TakeFeatures(unit=unit):
                assert unit in self.features
                self.features.remove(unit)
                self.taken.append(unit)
            case KeepGradient(unit=unit):
                assert unit in self.taken
                self.gradients.add(unit)
            case ScatterGradients(units=units):
                self.collectives.append(operation)
                if step.consumes:
                    assert set(units) <= self.gradients
                self.gradients -= set(units)
                self.own |= {unit for unit in units if unit in self.encoded}
            case EncoderBackward(unit=unit, more=more, joined=joined):
                assert (unit, *joined) in self.passes, "a graph goes backward as a whole"
                for each in (unit, *joined):
                    assert each in self.own
                    assert each not in self.backward
                    assert self.here(Kept.ACTIVATIONS, each)
                    self.backward.append(each)
                assert self.here(Kept.STATE)
                self.last_more = more
            case Offload() | Release() | Reload() | Await():
                for unit in operation.units or (None,):
                    self._move(operation, unit)
            case EncodeInForward():
                raise AssertionError("the executor has nothing to do with it")

    def _move(self, operation: Offload | Release | Reload | Await, unit: int | None) -> None:
        what, name = operation.what, (operation.what, unit)
        match operation:
            case Offload():
                assert name not in self.away
                if what is Kept.GRADIENTS:
                    assert unit in self.gradients
                    self.gradients.discard(unit or 0)
                if what is Kept.ACTIVATIONS:
                    assert unit in self.movable
                    self.movable.discard(unit)
                self.away[name] = "leaving"
            case Release():
                assert self.away[name] == "leaving"
                self.away[name] = "away"
            case Reload():
                assert self.away[name] == "away"
                self.away[name] = "coming"
            case Await():
                assert self.away.pop(name) == "coming"
                arriving = {Kept.FEATURES: self.features, Kept.GRADIENTS: self.gradients}
                if what in arriving and unit is not None:
                    arriving[what].add(unit)

    def done(self, plan: StepPlan) -> None:
        step = self.step
        assert sorted(u for u in self.encoded if u is not None) == step.mine(step.units)
        assert not self.payloads - {None}
        assert not self.features
        assert not self.gradients
        assert not self.away, "something stays on the host"
        assert not self.movable, "something was to leave"
        if self.step.consumes:
            assert self.taken == list(step.units)
        if step.trains and step.replica is not None:
            assert self.encoded, "a rank whose parameters have no gradient holds up the others"
            assert self.backward == self.encoded
            assert not self.last_more, "nobody starts the reduction"
        else:
            assert not self.backward
        for what in step.on_host - ({Kept.ACTIVATIONS} if not step.trains else set()):
            leaves = [
                each
                for operations in plan.values()
                for each in operations
                if (isinstance(each, Offload) and each.what is what)
                or (isinstance(each, GatherFeatures) and each.to_host and what is Kept.FEATURES)
            ]
            owns = what is not Kept.ACTIVATIONS or step.mine(step.units)
            assert leaves or not owns, f"{what} was to leave"


def walk(plan: StepPlan, step: EncoderStep, pipeline: Pipeline) -> list[Operation]:
    """The rank's collectives; AssertionError or KeyError for a plan that cannot be."""
    state = Walk(step)
    for operation in in_order(plan, step, pipeline):
        state.do(operation)
    state.done(plan)
    return state.collectives


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


@given(steps(everywhere=True))
def test_separated(ranks: list[tuple[EncoderStep, Pipeline]]) -> None:
    """All ranks enter the same exchanges in the same order."""
    entered = [walk(separated(step), step, pipeline) for step, pipeline in ranks]
    assert all(each == entered[0] for each in entered)


@given(steps(everywhere=False))
def test_group_ahead(ranks: list[tuple[EncoderStep, Pipeline]]) -> None:
    """All ranks of the first stage do; the others have nothing to do."""
    for step, pipeline in ranks:
        plan = group_ahead(step)
        if step.replica is None:
            assert not plan
            continue
        assert walk(plan, step, pipeline) == walk(group_ahead(ranks[0][0]), *ranks[0])


@given(steps(everywhere=True))
def test_passes_take_neighbours_up_to_a_budget(ranks: list[tuple[EncoderStep, Pipeline]]) -> None:
    for step, _ in ranks:
        passes = step.passes()
        assert [unit for each in passes for unit in each] == step.mine(step.units)
        taken = [sum(step.rows[unit] for unit in each) for each in passes]
        for each, rows in zip(passes, taken, strict=True):
            assert rows <= step.joined_rows or sum(step.rows[unit] > 0 for unit in each) == 1
        for (rows, _), (_, behind) in pairwise(zip(taken, passes, strict=True)):
            assert rows + step.rows[behind[0]] > step.joined_rows, "another one had room"
        alone = [(unit,) for unit in step.mine(step.units)]
        assert replace(step, rows=()).passes() == alone


@st.composite
def steps_apart(draw: st.DrawFn) -> list[tuple[EncoderStep, Pipeline]]:
    """One step on a rank of an encoder that lies apart, and on the decoder's, by stage."""
    stages, count = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    made = draw(st.integers(0, 3))  # pieces of each microbatch; 0: no sample is this replica's
    training = draw(st.booleans())
    decoding = EncoderStep(
        encoder_replicas=((0,),) * count,
        replicas=1,
        replica=None,
        consumes=False,
        training=training,
        trains=training and draw(st.booleans()),
        last_stage=False,
        warmup=draw(st.integers(1, 4)),
    )
    encoding = replace(
        decoding, encoder_replicas=((0,),) * (count * made), replica=0, pieces=max(made, 1)
    )
    found = [(encoding, Pipeline(stages=1, stage=0, chunks=1, group=1))]
    for stage in range(stages):
        step = replace(decoding, consumes=stage == 0, last_stage=stage == stages - 1)
        found.append((step, Pipeline(stages=stages, stage=stage, chunks=1, group=stages)))
    return found


@given(steps_apart())
def test_apart(ranks: list[tuple[EncoderStep, Pipeline]]) -> None:
    """Every unit goes over once each way, alone; stages that consume nothing do nothing."""
    for step, pipeline in ranks:
        plan = apart(step)
        if step.replica is None and not step.consumes:
            assert not plan
            continue
        entered = walk(plan, step, pipeline)
        alone = [range(unit, unit + 1) for unit in step.units]
        there = [each for each in entered if isinstance(each, GatherFeatures)]
        back = [each for each in entered if isinstance(each, ScatterGradients)]
        assert there == [GatherFeatures(units=each) for each in alone]
        assert back == [ScatterGradients(units=each) for each in alone if step.trains]
        more = [x.more for each in plan.values() for x in each if isinstance(x, EncoderBackward)]
        assert more == [True] * (len(more) - 1) + [False] * bool(more), "one reduction, at the end"


def told(plan: StepPlan) -> list[str]:
    """An encoder's operations in a few letters; the last backward, which reduces, in capitals."""
    words = []
    for each in plan.get(BEGIN, ()):
        match each:
            case Encode(unit=unit):
                words.append(f"encode {unit}")
            case GatherFeatures(units=units):
                words.append(f"send {units.start}")
            case ScatterGradients(units=units):
                words.append(f"wait {units.start}")
            case EncoderBackward(unit=unit, more=more):
                words.append(f"{'back' if more else 'BACK'} {unit}")
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
    warmup=2,
)


def test_an_encoder_apart_works_ahead_by_its_warmup() -> None:
    """Three microbatches of two pieces: two ahead, then one forward and one backward in turn."""
    pieces = [f"encode {n},send {n}" for n in range(6)]
    back = [f"wait {n},{'BACK' if n == 5 else 'back'} {n}" for n in range(6)]
    expected = ",".join([*pieces, *back])  # the third goes ahead of the first gradient
    assert told(apart(ENCODES)) == expected.split(",")
    one_ahead = [*pieces[:4], *back[:2], *pieces[4:], *back[2:]]
    assert told(apart(replace(ENCODES, warmup=1))) == ",".join(one_ahead).split(",")
    assert apart(ENCODES).keys() == {BEGIN}  # there is no schedule to wait for


def test_an_encoder_apart_that_has_nothing_to_learn_or_to_encode() -> None:
    frozen = apart(replace(ENCODES, trains=False))
    assert told(frozen) == [word for n in range(6) for word in (f"encode {n}", f"send {n}")]
    none = replace(ENCODES, encoder_replicas=(), pieces=1)
    assert told(apart(none)) == ["encode None", "BACK None"]
    assert not apart(replace(none, trains=False))


def test_a_decoder_whose_encoder_lies_apart() -> None:
    """Features come before a forward, and go back as gradients within its backward."""
    step = replace(
        ENCODES,
        encoder_replicas=((0,), (0,)),
        replica=None,
        consumes=True,
        pieces=1,
        last_stage=True,
    )
    alone = [range(unit, unit + 1) for unit in (0, 1)]
    taken = {
        forward(unit): (GatherFeatures(units=alone[unit]), TakeFeatures(unit=unit))
        for unit in (0, 1)
    }
    back = {
        gradient(unit): (KeepGradient(unit=unit), ScatterGradients(units=alone[unit]))
        for unit in (0, 1)
    }
    assert apart(step) == taken | back
    assert apart(replace(step, trains=False)) == taken


def without(plan: StepPlan, when: When, number: int) -> Mapping[When, tuple[Operation, ...]]:
    left = tuple(each for place, each in enumerate(plan[when]) if place != number)
    return {**plan, when: left}


@given(st.data())
def test_a_plan_that_lacks_any_operation_is_found(data: st.DataObject) -> None:
    """Also by ranks that then enter other exchanges than the rest."""
    ranks_of = {
        separated: steps(everywhere=True),
        group_ahead: steps(everywhere=False),
        apart: steps_apart(),
    }
    policy = data.draw(st.sampled_from([*ranks_of]))
    planned = [(policy(step), step, pipeline) for step, pipeline in data.draw(ranks_of[policy])]
    plan, step, pipeline = data.draw(st.sampled_from([each for each in planned if each[0]]))
    expected = walk(plan, step, pipeline)
    when = data.draw(st.sampled_from(sorted(plan, key=str)))
    number = data.draw(st.integers(0, len(plan[when]) - 1))
    try:
        found = walk(without(plan, when, number), step, pipeline)
    except (AssertionError, KeyError):
        return
    assert found != expected, plan[when][number]


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
    assert inline(step) == {forward(unit): (EncodeInForward(unit=unit),) for unit in (0, 1)}
    assert not inline(replace(step, consumes=False))
