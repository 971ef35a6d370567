"""Who encodes which piece when, so that encoders work while the decoder would wait. Pure.

In full separation all ranks of a model replica encode before the decoder's schedule and go backward
behind it, and the pipeline's bubble is wasted. :func:`streamed` puts encoder work into it: stages
encode while their first activations or first gradients are not there yet, and go backward through
the encoder in the schedule's cool-down. What is left is done before the schedule and behind it.

Costs are integers that every rank counts, so that all come to the same plan without a word. A
replica encodes its pieces in the order of microbatches and of the pieces within each, sends them in
this order, and goes backward through them in this order; the first stage takes features and gives
gradients back in the order of its forwards and backwards of the first chunk, which is the same. So
the sends and receives of a pair of ranks are in one order on both sides, in each direction.

Work before a pass belongs where the last pass's output has been sent, the next pass's receive is
posted, and nobody waits for it yet. That is in the pipeline's communicator: ``forward_step_func``
is called behind the wait. Nobody waits for the sends of features and gradients of features. A
replica without a piece has no work here, and still has to give every parameter a gradient.

Several encoders are planned together, in the order in which the decoder needs their pieces. A pass
is through one of them, and the order that is said above is that of each one's own pieces: features
and gradients of one encoder go over edges of its own.
"""

from collections import deque
from collections.abc import Sequence

from loongplug.hetero.balance import plan as balanced
from loongplug.hetero.step_costs import (
    EncoderPlan,
    EncoderWork,
    Name,
    Step,
)
from loongplug.hetero.step_programs import PlanClock, decoder_alone
from loongplug.hetero.streaming_blocks import at_the_ends, blocks, joined_passes, waits_of
from loongplug.hetero.streaming_draft import Draft, Habits, passes_ahead

# Plans are tried until so many passes and works have been placed, but never fewer than these.
_PLACED, _LEAST = 14_000, 6

# Found by trying many on steps of 2 to 8 stages, 8 to 32 microbatches and 1 to 8 pieces.
_FIRST = (
    Habits(start=2, late=2, urgent=True, extra=1),
    Habits(start=0, late=2, urgent=True, extra=0),
    Habits(start=8, late=1, urgent=False, extra=1),
    Habits(start=0, late=2, urgent=False, extra=1),
    Habits(start=0, late=0, urgent=False, extra=1),
    Habits(start=4, late=4, urgent=False, extra=1),
    Habits(start=2, late=1, urgent=True, extra=0),
    Habits(start=10, late=4, urgent=False, extra=1),
    Habits(start=4, late=2, urgent=False, extra=1),
    Habits(start=2, late=6, urgent=False, extra=1),
    Habits(start=10, late=8, urgent=False, extra=1),
    Habits(start=0, late=3, urgent=False, extra=3),
)

# Where passes take as long as many rows, few are tried: blocks are as fast there, or nearly so.
_JOINING = (
    Habits(start=16, late=0, urgent=True, extra=1, together=10),
    Habits(start=0, late=4, urgent=True, extra=0),
    Habits(start=12, late=4, urgent=True, extra=1, together=10),
    Habits(start=8, late=0, urgent=True, extra=1, together=6),
    Habits(start=8, late=4, urgent=True, extra=1, together=2),
    Habits(start=12, late=0, urgent=True, extra=1, together=8),
)


def streamed(step: Step, *, otherwise: int | None = None) -> EncoderPlan:
    """The fastest plan found: :func:`separated`'s where none is faster by the clock.

    ``otherwise``: when the step ends where it does not stream; a plan must end earlier. Without,
    that is :func:`separated`'s end. One stage never streams, for its pipeline never waits.
    """
    best = separated(step)
    if len(step.passes) == 1 or not any(step.pieces):
        return best
    clock, alone = PlanClock(step), decoder_alone(step)
    waits, passes = waits_of(step, alone), passes_ahead(step, alone)
    fastest = clock.time(best) if otherwise is None else otherwise
    assert fastest is not None, "ranks wait for one another"
    for plan in (blocks(step, waits, fill=fill) for fill in (0, 2, 4)):
        ends = clock.time(plan)
        if ends is not None and ends < fastest:
            best, fastest = plan, ends
    encoding = sum(step.encoding(*name) for name in step.names)
    few = 3 * sum(sum(step.encoder(name).each) for name in step.names) >= encoding
    placed = sum(map(len, step.passes)) + (1 + step.trains) * sum(map(len, step.pieces))
    count = len(_JOINING) if few else max(_LEAST, _PLACED // placed)
    drafts: dict[Habits, int] = {}  # and when they end
    waiting = deque(_JOINING if few else _FIRST)
    while waiting and len(drafts) < count:
        habits = waiting.popleft()
        draft = Draft(step, passes, habits)
        draft.fill()
        plan, ends = draft.plan(), draft.ends
        if any(any(each.each) for each in step.encoders):
            plan, ends = _with_joined(clock, plan, ends=ends)
        drafts[habits] = ends
        if ends < fastest:
            best, fastest = plan, ends
        if not waiting:
            closest = min(drafts, key=drafts.__getitem__)
            waiting.extend(each for each in closest.neighbours() if each not in drafts)
    return _with_joined(clock, best, ends=fastest)[0] if best.streamed else best


def separated(step: Step) -> EncoderPlan:
    """All pieces before the decoder's schedule, all backwards behind it; balanced by cost."""
    costs = [step.encoding(*name) for name in step.names]
    owners = balanced(costs, len(step.replicas), threshold=0)
    owned: list[list[Name]] = [[] for _ in step.replicas]
    for owner, name in zip(owners, step.names, strict=True):
        owned[owner].append(name)
    return EncoderPlan(work=at_the_ends(step, owned), streamed=False)


def _with_joined(clock: PlanClock, plan: EncoderPlan, *, ends: int) -> tuple[EncoderPlan, int]:
    """A plan and when it ends, with neighbouring passes joined where it ends no later so."""
    work = tuple(_neighbours(clock.step, each) for each in plan.work)
    joined = EncoderPlan(work=work, streamed=True)
    joined_ends = clock.time(joined)
    if joined_ends is None or joined_ends > ends:
        return plan, ends
    return joined, joined_ends


def _neighbours(step: Step, work: Sequence[EncoderWork]) -> tuple[EncoderWork, ...]:
    """Of one replica, with pieces joined that go before the same passes, there and back."""
    places = {(one.forward, name): at for at, one in enumerate(work) for name in one.pieces}
    lots: dict[tuple[int, int | None], list[Name]] = {}
    for one in work:
        if one.forward:
            back = places.get((False, one.pieces[0]))
            lot = one.before, None if back is None else work[back].before
            lots.setdefault(lot, []).extend(one.pieces)
    found = [
        (place, EncoderWork(work[place].before, forward, pieces))
        for names in lots.values()
        for pieces in joined_passes(step, names)
        for forward in (True, False)
        if (place := places.get((forward, pieces[-1]))) is not None
    ]
    return tuple(each for _, each in sorted(found))
