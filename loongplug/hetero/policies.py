"""When units are encoded, relative to the decoder's schedule: from a step to its plan. Pure."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from loongplug.hetero.operations import (
    BEGIN,
    END,
    Backward,
    Cargo,
    Encode,
    EncoderStep,
    EncoderWork,
    Exchange,
    Hand,
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
    backward,
    before_pass,
    forward,
    gradient,
)

Policy = Callable[[EncoderStep], StepPlan]


def inline(step: EncoderStep) -> StepPlan:
    """Each forward encodes its own microbatch, and each backward goes on through the encoder.

    The decoder's graph does that by itself, and the plan says when.
    """
    plan = _Draft(tuple)
    for unit in step.units if step.consumes else ():
        plan.at(forward(unit), Encode(pieces=(unit,)))
        if step.trains:
            plan.at(gradient(unit), Backward(pieces=(unit,), more=unit != step.units[-1]))
    return plan


def group_ahead(step: EncoderStep) -> StepPlan:
    """As many microbatches are encoded at a time as there are replicas, one by each.

    That is when the decoder comes to the first of them; of the last ones, a replica may have shares
    of several. When the decoder has gone backward through the last, the gradients go to the ranks
    that encoded the units, which go backward within that backward, in which Megatron lets
    reductions start. Section 3.2 of the LoongForge paper. The first stage's ranks alone do so.
    """
    plan = _Draft(tuple)
    if step.replica is None:
        return plan
    for first in step.units[:: step.replicas]:
        members = step.units[first : first + step.replicas]
        encoded: list[tuple[int, ...]] = [(unit,) for unit in step.mine(members)]
        if not encoded and step.trains:
            encoded = [()]
        plan.at(forward(first), *(Encode(pieces=each) for each in encoded))
        plan.at(forward(first), Exchange(what=Cargo.FEATURES, pieces=members))
        for unit in members:
            plan.at(forward(unit), Hand(what=Cargo.FEATURES, microbatch=unit))
            if step.trains:
                plan.at(gradient(unit), Hand(what=Cargo.GRADIENTS, microbatch=unit))
        if step.trains:
            last = gradient(members[-1])
            plan.at(last, Exchange(what=Cargo.GRADIENTS, pieces=members))
            plan.at(last, *(Backward(pieces=each, more=True) for each in encoded[:-1]))
            plan.at(last, Backward(pieces=encoded[-1], more=False))
    return plan


def separated(step: EncoderStep, *, reduces: bool = True) -> StepPlan:
    """Phase 1 encodes, phase 2 is the decoder's own schedule, phase 3 is the encoder's backward.

    Section 3.3 of the LoongForge paper. All ranks of a model replica encode, several small units in
    one pass. What is on the host leaves in phase 1, or at the start of phase 2; activations do so
    unit by unit, which are few on the device only if no pass has several. With ``reduces`` the last
    backward has the reductions set out; else somebody else does.
    """
    plan = _Draft(tuple)
    mine = step.mine(step.units)
    on_host = Kept.FEATURES in step.on_host
    moves = _activations_move(step)
    passes = step.passes()
    if moves:
        passes = [(unit,) for unit in mine]
    for before, pieces in zip([None, *mine], passes, strict=False):
        plan.at(BEGIN, Encode(pieces=pieces, movable=moves))
        if moves and before is not None:
            plan.at(BEGIN, Move(to=To.FREE, what=Kept.ACTIVATIONS, pieces=(before,)))
        if moves:
            plan.at(BEGIN, Move(to=To.LEAVE, what=Kept.ACTIVATIONS, pieces=pieces))
    if moves and mine:
        plan.at(BEGIN, Move(to=To.FREE, what=Kept.ACTIVATIONS, pieces=(mine[-1],)))
    # A reduction that overlaps starts when every parameter has a gradient.
    if step.trains and not mine:
        plan.at(BEGIN, Encode(pieces=()))
    plan.at(BEGIN, Exchange(what=Cargo.FEATURES, pieces=step.units, to_host=on_host))
    if on_host and step.consumes:
        plan.at(BEGIN, Move(to=To.RETURN, what=Kept.FEATURES, pieces=(0,)))
    if Kept.STATE in step.on_host:
        _state_away(plan, step)
    if step.consumes:
        _decode(plan, step, on_host=on_host)
    if step.trains:
        plan.at(END, Exchange(what=Cargo.GRADIENTS, pieces=step.units))
        _encoders_backward(plan, passes or [()], moves=moves and bool(mine), reduces=reduces)
    return plan


def streamed(step: EncoderStep) -> StepPlan:
    """Pieces are encoded, and gone backward through, where the pipeline would wait.

    What is done before which pass is :mod:`~loongplug.hetero.bubble_drafts`'s; without a ``stream``
    it is what is :func:`separated`. Replicas end at times of their own, and reduce together.
    """
    plan = _Draft(tuple)
    if step.trains:
        plan.at(BEGIN, Weights(gather=True))
    if step.stream is None:
        for when, operations in separated(step, reduces=False).items():
            plan.at(when, *operations)
    else:
        _bubbles(plan, step, step.stream)
    if step.trains:
        plan.at(END, Weights(gather=False))
    return plan


def apart(step: EncoderStep) -> StepPlan:
    """The encoder has ranks of its own: 1F1B from microbatch to microbatch, across modules.

    The encoder works some forwards ahead of its backwards. The decoder's ranks take features before
    a forward, and send gradients back within a backward. Section 4 of the MIMO paper. An encoder's
    stages hand on what they make, and get its gradient as far as something trains before it.
    """
    plan = _Draft(tuple)
    if step.replica is None:
        for unit in step.units if step.consumes else ():
            plan.at(forward(unit), Receive(what=Cargo.FEATURES, piece=unit))
            plan.at(forward(unit), Hand(what=Cargo.FEATURES, microbatch=unit))
            if step.trains:
                plan.at(gradient(unit), Hand(what=Cargo.GRADIENTS, microbatch=unit))
                plan.at(gradient(unit), Send(what=Cargo.GRADIENTS, piece=unit))
        return plan
    if not step.units:  # no sample is this replica's, and parameters have gradients nevertheless
        if step.trains:
            plan.at(BEGIN, Encode(pieces=()), Backward(pieces=(), more=False))
        return plan
    slots = [step.units[first : first + step.pieces] for first in step.units[:: step.pieces]]
    done = 0
    for number, count in enumerate(step.forwards if step.trains else (len(slots),)):
        for unit in chain.from_iterable(slots[done:count]):
            _stage_forward(plan, step, unit)
        for unit in slots[number] if step.trains else ():
            _stage_backward(plan, step, unit)
        done = count
    return plan


class _Draft(defaultdict[When, tuple[Operation, ...]]):
    def at(self, when: When, *operations: Operation) -> None:
        self[when] += operations


def _activations_move(step: EncoderStep) -> bool:
    return Kept.ACTIVATIONS in step.on_host and step.trains


def _bubbles(plan: _Draft, step: EncoderStep, stream: Stream) -> None:
    before, within = _activations_away(stream.work if _activations_move(step) else ())
    for number, moves in before.items():
        plan.at(before_pass(number), *moves)
    for place, (number, forwards, together) in enumerate(stream.work):
        when, moving = before_pass(number), within.get(place, ())
        if forwards:
            plan.at(when, Encode(pieces=together, movable=bool(moving)), *moving)
            plan.at(when, *(Send(what=Cargo.FEATURES, piece=piece) for piece in together))
        else:
            plan.at(when, *(Receive(what=Cargo.GRADIENTS, piece=piece) for piece in together))
            plan.at(when, *moving, Backward(pieces=together, more=True))
    for unit in step.units if step.consumes else ():
        pieces = stream.pieces[unit]
        plan.at(forward(unit), *(Receive(what=Cargo.FEATURES, piece=each) for each in pieces))
        plan.at(forward(unit), Hand(what=Cargo.FEATURES, microbatch=unit))
        if step.trains:
            plan.at(gradient(unit), Hand(what=Cargo.GRADIENTS, microbatch=unit))
            plan.at(gradient(unit), *(Send(what=Cargo.GRADIENTS, piece=each) for each in pieces))


def _activations_away(
    work: Sequence[EncoderWork[int]],
) -> tuple[Mapping[int, Sequence[Move]], Mapping[int, Sequence[Move]]]:
    """How activations leave and come back: first of all before a pass, and within a work.

    The latter is by the work's place: behind the forward of pieces, or ahead of their backward,
    when their gradients are there. Those leave whose backward is so much later that there is a pass
    to leave and come beside. A copy has the decoder's next pass to be done, or the encoder's own
    where that comes first. What is needed comes beside the pass before, or beside the encoder's
    backward before that.
    """
    begin = {each.pieces: each.before for each in work if each.forward}
    end = {each.pieces: each.before for each in work if not each.forward}
    moved = [
        (place, each)
        for place, each in enumerate(work)
        if end[each.pieces] - begin[each.pieces] > 2
    ]
    before: defaultdict[int, list[Move]] = defaultdict(list)
    within: defaultdict[int, list[Move]] = defaultdict(list)
    forwards = [each for each in moved if each[1].forward]
    for (place, one), behind in zip(forwards, [*forwards[1:], None], strict=False):
        within[place].append(Move(to=To.LEAVE, what=Kept.ACTIVATIONS, pieces=one.pieces[:1]))
        gone = Move(to=To.FREE, what=Kept.ACTIVATIONS, pieces=one.pieces[:1])
        if behind is not None and behind[1].before == one.before:
            within[behind[0]].append(gone)
        else:
            before[one.before + 1].append(gone)
    backwards = [each for each in moved if not each[1].forward]
    for (place, one), ahead in zip(backwards, [None, *backwards[:-1]], strict=False):
        comes = Move(to=To.RETURN, what=Kept.ACTIVATIONS, pieces=one.pieces[:1])
        within[place].append(Move(to=To.HERE, what=Kept.ACTIVATIONS, pieces=one.pieces[:1]))
        if ahead is not None and ahead[1].before == one.before:
            within[ahead[0]].append(comes)
        else:
            before[one.before - 1].append(comes)
    return before, within


def _stage_forward(plan: _Draft, step: EncoderStep, unit: int) -> None:
    if step.stage:
        plan.at(BEGIN, Receive(what=Cargo.STATES, piece=unit))
    made = Cargo.FEATURES if step.stage == step.stages - 1 else Cargo.STATES
    plan.at(BEGIN, Encode(pieces=(unit,)), Send(what=made, piece=unit))


def _stage_backward(plan: _Draft, step: EncoderStep, unit: int) -> None:
    last = step.stage == step.stages - 1
    came = Cargo.GRADIENTS if last else Cargo.STATE_GRADIENTS
    plan.at(BEGIN, Receive(what=came, piece=unit))
    plan.at(BEGIN, Backward(pieces=(unit,), more=unit != step.units[-1]))
    if step.trains_before:
        plan.at(BEGIN, Send(what=Cargo.STATE_GRADIENTS, piece=unit))


def _state_away(plan: _Draft, step: EncoderStep) -> None:
    """The encoder's state is on the host in phase 2.

    Where the schedule has several microbatches in flight, the state leaves beside the first
    forward and comes back beside the last backward, when most activations are not there yet or any
    more. Where one microbatch in flight is all there ever is, as on the last stage, the state has
    to be gone before the first forward and come back after the last backward.
    """
    beside = not step.last_stage and len(step.units) > 1
    plan.at(BEGIN, Move(to=To.LEAVE, what=Kept.STATE))
    plan.at(forward(1) if beside else BEGIN, Move(to=To.FREE, what=Kept.STATE))
    back = backward(step.units[-1]) if beside and step.training else END
    plan.at(back, Move(to=To.RETURN, what=Kept.STATE))
    plan.at(END, Move(to=To.HERE, what=Kept.STATE))


def _decode(plan: _Draft, step: EncoderStep, *, on_host: bool) -> None:
    """Phase 2. On the host are all features but the one in use and the next, and all gradients."""
    for unit in step.units:
        if on_host:
            plan.at(forward(unit), Move(to=To.HERE, what=Kept.FEATURES, pieces=(unit,)))
            if unit + 1 in step.units:
                plan.at(forward(unit), Move(to=To.RETURN, what=Kept.FEATURES, pieces=(unit + 1,)))
        plan.at(forward(unit), Hand(what=Cargo.FEATURES, microbatch=unit))
        if step.trains:
            plan.at(gradient(unit), Hand(what=Cargo.GRADIENTS, microbatch=unit))
        if step.trains and on_host:
            if unit:
                plan.at(gradient(unit), Move(to=To.FREE, what=Kept.GRADIENTS, pieces=(unit - 1,)))
            plan.at(gradient(unit), Move(to=To.LEAVE, what=Kept.GRADIENTS, pieces=(unit,)))
    if step.trains and on_host:
        everything = tuple(step.units)
        plan.at(END, Move(to=To.FREE, what=Kept.GRADIENTS, pieces=everything[-1:]))
        plan.at(END, Move(to=To.RETURN, what=Kept.GRADIENTS, pieces=everything))
        plan.at(END, Move(to=To.HERE, what=Kept.GRADIENTS, pieces=everything))


def _encoders_backward(
    plan: _Draft, passes: list[tuple[int, ...]], *, moves: bool, reduces: bool
) -> None:
    """Phase 3 of a rank; with ``moves``, the next unit's activations come beside a backward."""
    if moves:
        plan.at(END, Move(to=To.RETURN, what=Kept.ACTIVATIONS, pieces=passes[0]))
    for number, pieces in enumerate(passes):
        behind = passes[number + 1 : number + 2]
        if moves:
            plan.at(END, Move(to=To.HERE, what=Kept.ACTIVATIONS, pieces=pieces))
        if moves and behind:
            plan.at(END, Move(to=To.RETURN, what=Kept.ACTIVATIONS, pieces=behind[0]))
        plan.at(END, Backward(pieces=pieces, more=bool(behind) or not reduces))
