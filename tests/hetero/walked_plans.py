"""Walks one rank's plan in the order of its schedule, and asks of each operation what it needs."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from loongplug.hetero.operations import (
    Await,
    Encode,
    EncodeInForward,
    EncodePieces,
    EncoderBackward,
    Event,
    GatherFeatures,
    GatherWeights,
    GiveBack,
    HandOn,
    KeepGradient,
    Kept,
    Offload,
    Operation,
    PiecesBackward,
    ReceiveFeatures,
    ReceiveGradient,
    ReduceGradients,
    Release,
    Reload,
    ScatterGradients,
    SendFeatures,
    SendGradients,
    StepPlan,
    TakeBack,
    TakeFeatures,
    TakeStates,
    When,
)
from loongplug.hetero.pass_order import Pipeline, events
from loongplug.hetero.policies import EncoderStep


def in_order(plan: StepPlan, step: EncoderStep, pipeline: Pipeline) -> Iterator[Operation]:
    """A rank's operations as its schedule comes to them."""
    never = set() if step.training else {Event.BACKWARD, Event.GRADIENT}
    never |= set() if step.consumes else {Event.GRADIENT}
    passed = [
        each
        for each in events(pipeline, len(step.encoder_replicas))
        if isinstance(each, When) and each.event not in never
    ]
    for each in passed:
        yield from plan.get(each, ())
    assert plan.keys() <= {*passed}, f"nobody comes to {plan.keys() - {*passed}}"


@dataclass
class Walk:
    """What one rank has at a moment of its step; each operation says what it needs.

    What is encoded and goes backward is a unit, or a piece where the step streams.
    """

    step: EncoderStep
    encoded: list[int | None] = field(default_factory=list)
    passes: list[tuple[int | None, ...]] = field(default_factory=list)
    collectives: list[Operation] = field(default_factory=list)
    received: dict[int, range] = field(default_factory=dict)  # a unit's pieces
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
            case EncodePieces() | SendFeatures() | ReceiveGradient() | PiecesBackward():
                self._piece(operation)
            case ReceiveFeatures(unit=unit, pieces=pieces):
                assert step.stream is not None
                assert step.consumes
                assert pieces == step.stream.pieces[unit]
                self.features.add(unit)
                self.received[unit] = pieces
            case SendGradients(unit=unit, pieces=pieces):
                assert pieces == self.received.pop(unit), "each piece's goes where it came from"
                self.gradients.remove(unit)
            case GatherWeights():
                assert not self.encoded
                self.collectives.append(operation)
            case ReduceGradients():
                assert GatherWeights() in self.collectives
                assert sorted(map(str, self.backward)) == sorted(map(str, self.encoded))
                self.collectives.append(operation)
            case EncodeInForward():
                raise AssertionError("the executor has nothing to do with it")
            case TakeStates() | HandOn() | TakeBack() | GiveBack():
                raise AssertionError("the encoder has one stage")

    def _piece(
        self, operation: EncodePieces | SendFeatures | ReceiveGradient | PiecesBackward
    ) -> None:
        match operation:
            case EncodePieces(pieces=pieces, movable=movable):
                if movable:
                    self.movable.add(pieces[0])  # it stands for all of the pass
                assert not {*pieces} & {*self.encoded}
                self.encoded += pieces
                self.payloads |= {*pieces}
                self.passes.append(pieces)
            case SendFeatures(piece=piece):
                self.payloads.remove(piece)
            case ReceiveGradient(piece=piece):
                assert self.step.trains
                assert piece in self.encoded
                assert piece not in self.own
                self.own.add(piece)
            case PiecesBackward(pieces=pieces):
                assert pieces in self.passes, "a graph goes backward as a whole"
                assert {*pieces} <= self.own
                assert not {*pieces} & {*self.backward}
                assert self.here(Kept.ACTIVATIONS, pieces[0])
                assert ReduceGradients() not in self.collectives
                self.backward += pieces
                self.last_more = True

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
        step, reduced = self.step, ReduceGradients() in self.collectives
        assert sorted(u for u in self.encoded if u is not None) == _to_encode(step)
        assert not self.payloads - {None}
        assert not self.features
        assert not self.gradients
        assert not self.away, "something stays on the host"
        assert not self.movable, "something was to leave"
        if step.consumes:
            assert self.taken == list(step.units)
        if step.trains and step.replica is not None:
            assert self.encoded or reduced, "parameters without a gradient hold up the others"
            if step.stream is None:
                assert self.backward == self.encoded
            assert len(self.backward) == len(self.encoded)
            assert reduced or not self.last_more, "nobody starts the reduction"
            assert self.last_more or not reduced or not self.encoded, "it is started twice"
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
            owns = what is not Kept.ACTIVATIONS or _stays_long(step)
            assert leaves or not owns, f"{what} was to leave"


def _to_encode(step: EncoderStep) -> list[int]:
    """Units, or pieces."""
    if step.stream is None:
        return step.mine(step.units)
    return sorted(piece for each in step.stream.work if each.forward for piece in each.pieces)


def _stays_long(step: EncoderStep) -> bool:
    """Whether a pass through the encoder waits so long for its backward that it should leave."""
    if step.stream is None:
        return bool(step.mine(step.units))
    begin = {each.pieces: each.before for each in step.stream.work if each.forward}
    ends = (each for each in step.stream.work if not each.forward)
    return any(each.before - begin[each.pieces] > 2 for each in ends)


def walk(plan: StepPlan, step: EncoderStep, pipeline: Pipeline) -> list[Operation]:
    """The rank's collectives; AssertionError or KeyError for a plan that cannot be."""
    state = Walk(step)
    for operation in in_order(plan, step, pipeline):
        state.do(operation)
    state.done(plan)
    return state.collectives
