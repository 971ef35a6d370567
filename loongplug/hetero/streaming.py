"""Who encodes which piece when, so that the encoder works while the decoder would wait. Pure.

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
"""

from collections.abc import Iterable, Iterator, Sequence

from loongplug.hetero.balance import plan as balanced
from loongplug.hetero.pieces import runs
from loongplug.hetero.step_costs import EncoderPlan, EncoderWork, Name, Step
from loongplug.hetero.step_programs import PassOnClock, PlanClock, decoder_alone
from loongplug.hetero.streaming_draft import Habits, drafted, passes_ahead

# Chosen of 316 by measuring them beside the blocks, on 226 steps of 2 to 8 stages: even and uneven,
# of several replicas and virtual stages, of passes that cost nothing to three pieces each.
_HABITS = (
    Habits(start=0, late=3, urgent=False, extra=3, together=0),
    Habits(start=2, late=1, urgent=True, extra=0, together=0),
    Habits(start=4, late=4, urgent=True, extra=1, together=4),
    Habits(start=10, late=0, urgent=True, extra=1, together=0),
    Habits(start=12, late=1, urgent=True, extra=1, together=0),
    Habits(start=16, late=0, urgent=False, extra=1, together=8),
)


def streamed(step: Step, *, otherwise: int | None = None) -> EncoderPlan:
    """The fastest plan of a few: :func:`separated`'s where none is faster by the clock.

    ``otherwise``: when the step ends where it does not stream; a plan must end earlier. Without,
    that is :func:`separated`'s end. One stage never streams, for its pipeline never waits.
    """
    best = separated(step)
    if len(step.passes) == 1 or not any(step.pieces):
        return best
    clock = PlanClock(step)
    fastest = clock.time(best) if otherwise is None else otherwise
    assert fastest is not None, "ranks wait for one another"
    for plan in _plans(step):
        ends = clock.time(plan)
        if ends is not None and ends < fastest:
            best, fastest = plan, ends
    return best


def separated(step: Step) -> EncoderPlan:
    """All pieces before the decoder's schedule, all backwards behind it; balanced by cost."""
    costs = [step.encoding(*name) for name in step.names]
    owners = balanced(costs, len(step.replicas), threshold=0)
    return EncoderPlan(work=_at_the_ends(step, owners), streamed=False)


def _plans(step: Step) -> Iterator[EncoderPlan]:
    """What is tried; of two that are equally fast, the first has fewer passes."""
    alone = decoder_alone(step)
    yield _blocks(step, alone)
    passes = passes_ahead(step, alone)
    for habits in _HABITS:
        plan = drafted(step, passes, habits)
        if any(step.encoder.each):
            yield EncoderPlan(work=tuple(_joined(step, each) for each in plan.work), streamed=True)
        yield plan


def _blocks(step: Step, alone: Iterable[PassOnClock]) -> EncoderPlan:
    """One block of neighbouring pieces to each replica, before its first pass, and back at its end.

    Later stages have later pieces, and more of them: their first activations come later, and they
    are through earlier, as is seen of the decoder ``alone``. The first stage has the last pieces,
    too, of as many microbatches as there are later stages: it is through last, so that nobody else
    waits for what they give back.
    """
    begins = {each.one: each.begin for each in alone}
    ends = [begins[passes[-1]] + step.cost(passes[-1]) for passes in step.passes]
    waits = [
        begins[passes[0]] + max(ends) - end for passes, end in zip(step.passes, ends, strict=True)
    ]
    costs = [step.encoding(*name) for name in step.names]
    rooms = _filled([waits[stage] for stage in step.replicas], sum(costs))
    last = range(len(step.pieces) - len(step.passes) + 1, len(step.pieces))
    tail = sum(step.encoding(*name) for name in step.names if name[0] in last)
    first = step.lanes[0]
    tails = [min(rooms[replica], tail // len(first)) for replica in first]
    for replica, each in zip(first, tails, strict=True):
        rooms[replica] -= each
    owners = [*range(len(rooms)), *first]
    dealt = _dealt([*rooms, *tails], costs)
    work = _at_the_ends(step, [owners[place] for place in dealt])
    return EncoderPlan(work=work, streamed=True)


def _filled(free: Sequence[int], work: int) -> list[int]:
    """What each takes of the ``work`` so that all are through at once who have something to do."""
    left = sorted(free, reverse=True)
    while left:
        level = (work - sum(left)) // len(left)
        if level + left[-1] >= 0:
            break
        left.pop()
    return [max(0, level + each) for each in free]


def _dealt(rooms: Sequence[int], costs: Sequence[int]) -> list[int]:
    """In which of the ``rooms``, in order, each cost is: where at least half of it fits."""
    found, ends, taken, place = [], rooms[0], 0, 0
    for cost in costs:
        while 2 * taken + cost > 2 * ends and place + 1 < len(rooms):
            place += 1
            ends += rooms[place]
        found.append(place)
        taken += cost
    return found


def _at_the_ends(step: Step, owners: Sequence[int]) -> tuple[tuple[EncoderWork, ...], ...]:
    """By replica: its pieces before its first pass, and all back behind its last."""
    owned: list[list[Name]] = [[] for _ in step.replicas]
    for owner, name in zip(owners, step.names, strict=True):
        owned[owner].append(name)
    return tuple(
        tuple(
            EncoderWork(before, forward, names)
            for before, forward in ((0, True), (len(step.passes[stage]), False))
            for names in (_passes(step, each) if forward or step.encoder.trains else ())
        )
        for each, stage in zip(owned, step.replicas, strict=True)
    )


def _passes(step: Step, names: Sequence[Name]) -> list[tuple[Name, ...]]:
    """Pieces of one replica that nothing keeps apart, in as few passes as there may be."""
    costs = [step.pieces[unit][piece].forward for unit, piece in names]
    return [tuple(names[each.start : each.stop]) for each in runs(costs, step.encoder.joined)]


def _joined(step: Step, work: Sequence[EncoderWork]) -> tuple[EncoderWork, ...]:
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
        for pieces in _passes(step, names)
        for forward in (True, False)
        if (place := places.get((forward, pieces[-1]))) is not None
    ]
    return tuple(each for _, each in sorted(found))
