"""Walks one rank's plan in the order of its schedule, and asks of each operation what it needs."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from loongplug.hetero.encoder_steps import EncoderStep, Stream
from loongplug.hetero.operations import (
    Backward,
    Cargo,
    Encode,
    Event,
    Exchange,
    Hand,
    Kept,
    Move,
    Operation,
    Receive,
    Send,
    StepPlan,
    To,
    Weights,
    When,
)
from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.recorded_schedule import events


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
    """What one rank has at a moment of its step; each operation says what it needs."""

    step: EncoderStep
    encoded: list[int] = field(default_factory=list)
    passes: list[tuple[int, ...]] = field(default_factory=list)
    collectives: list[Operation] = field(default_factory=list)
    wired: list[Operation] = field(default_factory=list)  # sends and receives
    payloads: set[int] = field(default_factory=set)
    features: set[int] = field(default_factory=set)  # on the device
    taken: list[int] = field(default_factory=list)  # microbatches
    came: list[int] = field(default_factory=list)  # microbatches, with their gradients
    gradients: set[int] = field(default_factory=set)  # on the device
    own: set[int] = field(default_factory=set)  # may go backward
    backward: list[tuple[int, ...]] = field(default_factory=list)  # passes
    last_more: bool = False
    movable: set[int] = field(default_factory=set)  # what their backward needs may leave
    away: dict[tuple[Kept, int | None], str] = field(default_factory=dict)

    def here(self, what: Kept, piece: int | None = None) -> bool:
        return (what, piece) not in self.away

    def pieces_of(self, microbatch: int) -> set[int]:
        stream = self.step.stream
        return {microbatch} if stream is None else {*stream.pieces[microbatch]}

    def owned(self, pieces: range) -> set[int]:
        """Those of microbatches that are not cut."""
        return {each for each in pieces if self.step.replica in self.step.encoder_replicas[each]}

    def do(self, operation: Operation) -> None:
        step = self.step
        match operation:
            case Encode(pieces=pieces, movable=movable):
                assert self.here(Kept.STATE)
                if step.stream:
                    leaves = Kept.ACTIVATIONS in step.on_host and pieces in _stay_long(step.stream)
                    assert movable == leaves
                if movable:
                    assert step.stream or not pieces[1:], "they would be on the device together"
                    self.movable.add(pieces[0])  # it stands for all of the pass
                assert step.stream or {*pieces} <= self.owned(step.units)
                assert not {*pieces} & {*self.encoded}
                self.encoded += pieces
                self.payloads |= {*pieces}
                self.passes.append(pieces)
            case Exchange(what=Cargo.FEATURES, pieces=pieces, to_host=to_host):
                self.collectives.append(operation)
                assert self.owned(pieces) <= self.payloads, "a piece is sent that was not encoded"
                self.payloads -= self.owned(pieces)
                if step.consumes and to_host:
                    self.away |= {(Kept.FEATURES, piece): "away" for piece in pieces}
                elif step.consumes:
                    self.features |= {*pieces}
            case Exchange(pieces=pieces):
                self.collectives.append(operation)
                if step.consumes:
                    assert {*pieces} <= self.gradients
                self.gradients -= {*pieces}
                self.own |= {*pieces} & {*self.encoded}
            case Send(what=Cargo.FEATURES, piece=piece):
                self.wired.append(operation)
                self.payloads.remove(piece)
            case Receive(what=Cargo.FEATURES, piece=piece):
                self.wired.append(operation)
                assert step.consumes
                self.features.add(piece)
            case Send(what=Cargo.GRADIENTS, piece=piece):
                self.wired.append(operation)
                self.gradients.remove(piece)
            case Receive(what=Cargo.GRADIENTS, piece=piece):
                self.wired.append(operation)
                assert step.trains
                assert piece in self.encoded
                assert piece not in self.own
                self.own.add(piece)
            case Send() | Receive():
                raise AssertionError("the encoder has one stage")
            case Hand(what=Cargo.FEATURES, microbatch=microbatch):
                assert self.pieces_of(microbatch) <= self.features
                self.features -= self.pieces_of(microbatch)
                self.taken.append(microbatch)
            case Hand(microbatch=microbatch):
                assert microbatch in self.taken
                self.came.append(microbatch)
                self.gradients |= self.pieces_of(microbatch)
            case Backward(pieces=pieces, more=more):
                assert pieces in self.passes, "a graph goes backward as a whole"
                assert {*pieces} <= self.own
                assert pieces not in self.backward
                assert self.here(Kept.ACTIVATIONS, next(iter(pieces), None))
                assert self.here(Kept.STATE)
                assert Weights(gather=False) not in self.collectives
                self.backward.append(pieces)
                self.last_more = more
            case Move(pieces=pieces):
                for piece in pieces or (None,):
                    self._move(operation, piece)
            case Weights(gather=gather):
                assert not gather or not self.encoded
                assert gather or Weights(gather=True) in self.collectives
                assert gather or sorted(self.backward) == sorted(self.passes)
                self.collectives.append(operation)

    def _move(self, operation: Move, piece: int | None) -> None:
        what, name = operation.what, (operation.what, piece)
        match operation.to:
            case To.LEAVE:
                assert name not in self.away
                if piece is not None and what is Kept.GRADIENTS:
                    self.gradients.remove(piece)
                if piece is not None and what is Kept.ACTIVATIONS:
                    self.movable.remove(piece)
                self.away[name] = "leaving"
            case To.FREE:
                assert self.away[name] == "leaving"
                self.away[name] = "away"
            case To.RETURN:
                assert self.away[name] == "away"
                self.away[name] = "coming"
            case To.HERE:
                assert self.away.pop(name) == "coming"
                arriving = {Kept.FEATURES: self.features, Kept.GRADIENTS: self.gradients}
                if what in arriving and piece is not None:
                    arriving[what].add(piece)

    def done(self, plan: StepPlan) -> None:
        step, reduced = self.step, Weights(gather=False) in self.collectives
        assert sorted(self.encoded) == _to_encode(step)
        assert not self.payloads
        assert not self.features
        assert not self.gradients
        assert not self.away, "something stays on the host"
        assert not self.movable, "something was to leave"
        if step.consumes:
            assert self.taken == list(step.units)
            assert sorted(self.came) == (list(step.units) if step.trains else [])
        if step.trains and step.replica is not None:
            assert self.passes or reduced, "parameters without a gradient hold up the others"
            if step.stream is None:
                assert self.backward == self.passes
            assert len(self.backward) == len(self.passes)
            assert reduced or not self.last_more, "nobody starts the reduction"
            assert self.last_more or not reduced or not self.passes, "it is started twice"
        else:
            assert not self.backward
        for what in step.on_host - ({Kept.ACTIVATIONS} if not step.trains else set()):
            leaves = [
                each
                for operations in plan.values()
                for each in operations
                if (isinstance(each, Move) and each.what is what)
                or (isinstance(each, Exchange) and each.to_host and what is Kept.FEATURES)
            ]
            owns = what is not Kept.ACTIVATIONS or step.mine(step.units)
            assert leaves or step.stream or not owns, f"{what} was to leave"


def _to_encode(step: EncoderStep) -> list[int]:
    """Units, or pieces."""
    if step.stream is None:
        return step.mine(step.units)
    return sorted(piece for each in step.stream.work if each.forward for piece in each.pieces)


def _stay_long(stream: Stream) -> set[tuple[int, ...]]:
    """Passes through the encoder that wait so long for their backward that they should leave."""
    begin = {each.pieces: each.before for each in stream.work if each.forward}
    ends = (each for each in stream.work if not each.forward)
    return {each.pieces for each in ends if each.before - begin[each.pieces] > 2}


def walked(plan: StepPlan, step: EncoderStep, pipeline: Pipeline) -> Walk:
    """A rank's whole step; AssertionError or KeyError for a plan that cannot be."""
    state = Walk(step)
    for operation in in_order(plan, step, pipeline):
        state.do(operation)
    state.done(plan)
    return state


def walk(plan: StepPlan, step: EncoderStep, pipeline: Pipeline) -> list[Operation]:
    """The rank's collectives; raises as :func:`walked`."""
    return walked(plan, step, pipeline).collectives
