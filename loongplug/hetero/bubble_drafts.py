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

Nobody waits for these sends. A replica without a piece has no work here, and still has to give
every parameter a gradient.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import inf

from loongplug.hetero.balance import in_passes
from loongplug.hetero.encoder_steps import EncoderWork
from loongplug.hetero.step_costs import DecoderPass, EncoderPlan, Name, Step
from loongplug.hetero.step_programs import PlanClock, decoder_alone


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How a draft decides; which are best depends on the step.

    The decoder's first forward may wait until ``start`` sixteenths of the encoder's forward could
    be done. Encoder work may end so late that the decoder is through ``late`` quarters of a piece's
    backward later than it could be. With ``urgent`` it may make the decoder wait where the first
    stage would soon wait for its features. A replica encodes up to the mean of all, and ``extra``
    halves of a piece beyond. A pass has up to ``together`` sixteenths of a replica's even share of
    the pieces, but one at least.
    """

    start: int
    late: int
    urgent: bool
    extra: int
    together: int


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


def streamed(step: Step, *, otherwise: int) -> EncoderPlan | None:
    """The fastest plan of a few by the clock; None where none ends before ``otherwise``.

    That is when the step ends where it does not stream. One stage never streams, for its pipeline
    never waits.
    """
    best = None
    if len(step.passes) == 1 or not any(step.pieces):
        return best
    clock = PlanClock(step)
    for plan in _plans(step):
        ends = clock.time(plan)
        if ends is not None and ends < otherwise:
            best, otherwise = plan, ends
    return best


def _plans(step: Step) -> Iterator[EncoderPlan]:
    """What is tried; of two that are equally fast, the first has fewer passes."""
    alone = decoder_alone(step)
    yield _blocks(step, alone)
    tails = _tails(step, alone)
    for habits in _HABITS:
        plan = _Draft(step, tails, habits).plan()
        if any(step.encoder.each):
            yield tuple(_joined(step, each) for each in plan)
        yield plan


def _blocks(step: Step, alone: Mapping[DecoderPass, int]) -> EncoderPlan:
    """One block of neighbouring pieces to each replica, before its first pass, and back at its end.

    Later stages have later pieces, and more of them: their first activations come later, and they
    are through earlier, as is seen of the decoder ``alone``. The first stage has the last pieces,
    too, of as many microbatches as there are later stages: it is through last, so that nobody else
    waits for what they give back.
    """
    ends = [alone[passes[-1]] + step.cost(passes[-1]) for passes in step.passes]
    waits = [
        alone[passes[0]] + max(ends) - end for passes, end in zip(step.passes, ends, strict=True)
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
    return _at_the_ends(step, [owners[place] for place in dealt])


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


def _at_the_ends(step: Step, owners: Sequence[int]) -> EncoderPlan:
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
    return in_passes(names, costs, most=step.encoder.joined)


def _joined(step: Step, work: Sequence[EncoderWork[Name]]) -> tuple[EncoderWork[Name], ...]:
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


def _tails(step: Step, alone: Iterable[DecoderPass]) -> dict[DecoderPass, int]:
    """From each pass's begin to the end of the schedule at the earliest, by the decoder ``alone``.

    A piece's backward that waits for a pass counts, too.
    """
    found: dict[DecoderPass, int] = {}
    own = [0 for _ in step.passes]  # by stage, of its next pass
    for one in reversed([*alone]):
        stage, behind = one.place % len(own), step.behind.get(one)
        if behind is not None:
            own[stage] = max(own[stage], found[behind])
        elif step.encoder.trains and step.pieces[one.microbatch]:
            largest = max(each.backward for each in step.pieces[one.microbatch])
            own[stage] = max(own[stage], step.encoder.each.backward + largest)
        found[one] = own[stage] = own[stage] + step.cost(one)
    return found


class _Draft:
    """A plan in the making: whoever is free takes what fits, from the step's begin to its end.

    A rank that waits for the decoder does encoder work that is done before the pass has to begin:
    when its input is there, or, if that is later, when a pass must begin for the decoder to be
    through in time. Pieces are encoded in their order, by whoever comes first.
    """

    def __init__(self, step: Step, tails: Mapping[DecoderPass, int], habits: Habits) -> None:
        """``tails`` are from the begin of each pass to the end of the schedule, at the least."""
        self._step, self._tails, self._habits = step, tails, habits
        replicas = range(len(step.replicas))
        costs = [step.pieces[microbatch][piece] for microbatch, piece in step.names]
        phase = sum(cost.forward for cost in costs) // len(replicas)
        piece = max(cost.backward if step.encoder.trains else cost.forward for cost in costs)
        longest = max(tails[passes[0]] for passes in step.passes)
        self._target = longest + phase * habits.start // 16 + piece * habits.late // 4
        self._needed = {  # when the first pass of a microbatch must begin
            one.microbatch: self._target - tails[one]
            for one in step.passes[0]
            if step.before(one) is None
        }
        self._encoding = {name: step.encoding(*name) for name in step.names}
        decoding = [step.decoding[stage] for stage in step.replicas]
        mean = -(-(sum(self._encoding.values()) + sum(decoding)) // len(replicas))
        extra = max(self._encoding.values()) * habits.extra // 2
        self._room = [mean + extra - each for each in decoding]  # for more pieces, by cost
        share = len(step.names) * habits.together // (16 * len(replicas))
        self._together = max(1, share)
        self._events: list[tuple[int, int]] = []  # when to look at a replica
        self._free = [0 for _ in replicas]
        self._ready = [False for _ in replicas]  # for the next pass
        self._next = [0 for _ in step.passes]
        self._ends: dict[DecoderPass, int] = {}
        self._to_encode = deque(step.names)
        self._missing = [len(pieces) for pieces in step.pieces]
        self._features = [0 for _ in step.pieces]  # when the latest piece of a microbatch is there
        self._gradients: list[int | None] = [None for _ in step.pieces]  # when they are there
        self._owners: list[set[int]] = [set() for _ in step.pieces]
        # By replica, whose graphs go back in the order in which they were made: passes' pieces, and
        # what each takes.
        self._to_go_backward = [deque[tuple[tuple[Name, ...], int]]() for _ in replicas]
        self._work: list[list[EncoderWork[Name]]] = [[] for _ in replicas]

    def plan(self) -> EncoderPlan:
        """With all that there is in its place."""
        replicas = range(len(self._step.replicas))
        self._look(0, replicas)
        now = 0
        while self._events or self._to_encode:
            if self._events:
                now, replica = heappop(self._events)
                if self._free[replica] <= now and not self._ready[replica]:
                    self._decide(replica, now)
            else:
                # All wait for features that nobody has room for.
                replica = max(replicas, key=lambda at: (self._room[at], -at))
                self._ready[replica] = False
                self._encode(replica, now, 1)
        return tuple(map(tuple, self._work))

    def _look(self, when: int, replicas: Iterable[int]) -> None:
        for replica in replicas:
            if self._free[replica] <= when:  # else it is looked at when it is free
                heappush(self._events, (when, replica))

    def _decide(self, replica: int, now: int) -> None:
        stage = self._step.replicas[replica]
        passes, here = self._step.passes[stage], self._next[stage]
        one = passes[here] if here < len(passes) else None
        comes = None if one is None else self._comes(one)
        bound = inf if one is None else max(self._target - self._tails[one], comes or 0)
        if count := self._may_encode(replica, now, bound):
            self._encode(replica, now, count)
        elif self._may_go_backward(replica, now, bound):
            self._place(replica, now, *self._to_go_backward[replica].popleft(), forward=False)
        elif one is not None and comes is not None and comes <= now:
            self._ready[replica] = True
            if all(self._ready[each] for each in self._step.lanes[stage]):
                self._decode(stage, one, now)

    def _comes(self, one: DecoderPass) -> int | None:
        """When the input of a pass is there; None for not yet known."""
        before = self._step.before(one)
        if before is not None:
            return self._ends.get(before)
        return None if self._missing[one.microbatch] else self._features[one.microbatch]

    def _may_encode(self, replica: int, now: int, bound: float) -> int:
        """How many of the next pieces in one pass."""
        step, room = self._step, self._room[replica]
        count, taken, end = 0, 0, now + step.encoder.each.forward
        for unit, piece in islice(self._to_encode, self._together):
            takes = step.pieces[unit][piece].forward
            taken, end = taken + takes, end + takes
            if room <= 0 or (count and taken > step.encoder.joined):
                break
            urgent = self._habits.urgent and end > self._needed[unit]
            if end > bound and not urgent:
                break
            room -= self._encoding[unit, piece]
            count += 1
        return count

    def _may_go_backward(self, replica: int, now: int, bound: float) -> bool:
        """Whether the next ones may, whose gradients have to be there."""
        queue = self._to_go_backward[replica]
        if not queue:
            return False
        names, takes = queue[0]
        came = self._gradients[names[-1][0]]
        return came is not None and came <= now and now + takes <= bound

    def _encode(self, replica: int, now: int, count: int) -> None:
        names, step = tuple(self._to_encode.popleft() for _ in range(count)), self._step
        takes, back = (step.encoder_pass(names, forward=way) for way in (True, False))
        end = self._place(replica, now, names, takes, forward=True)
        if step.encoder.trains:
            self._to_go_backward[replica].append((names, back))
            self._owners[names[-1][0]].add(replica)
        for name in names:
            microbatch = name[0]
            self._room[replica] -= self._encoding[name]
            self._missing[microbatch] -= 1
            self._features[microbatch] = max(self._features[microbatch], end)
            if not self._missing[microbatch]:
                self._look(now, step.lanes[0])
                self._look(self._features[microbatch], step.lanes[0])

    def _place(
        self, replica: int, now: int, names: tuple[Name, ...], takes: int, *, forward: bool
    ) -> int:
        """When it ends."""
        before = self._next[self._step.replicas[replica]]
        self._work[replica].append(EncoderWork(before, forward, names))
        end = self._free[replica] = now + takes
        self._look(end, [replica])
        return end

    def _decode(self, stage: int, one: DecoderPass, now: int) -> None:
        end = self._ends[one] = now + self._step.cost(one)
        self._next[stage] += 1
        lanes = self._step.lanes[stage]
        for replica in lanes:
            self._ready[replica], self._free[replica] = False, end
        self._look(end, lanes)
        behind = self._step.behind.get(one)
        if behind is None:
            self._gradients[one.microbatch] = end
            self._look(end, self._owners[one.microbatch])
        else:
            lanes = self._step.lanes[behind.place % len(self._next)]
            self._look(now, lanes)
            self._look(end, lanes)
