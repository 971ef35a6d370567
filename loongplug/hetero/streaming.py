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
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from loongplug.hetero.balance import plan as balanced
from loongplug.hetero.pipeline_clock import (
    DecoderPass,
    EncoderPlan,
    EncoderWork,
    Step,
    simulate,
)

# Plans are tried until so many passes and works have been placed, but never fewer than these.
_PLACED, _LEAST = 14_000, 6


def streamed(step: Step) -> EncoderPlan:
    """The fastest plan found: :func:`separated`'s where none is faster by the clock.

    That is also where there is one stage, whose pipeline never waits.
    """
    best = separated(step)
    times = simulate(step, best)
    assert times is not None, "phases one behind the other"
    if len(step.passes) == 1 or not any(step.pieces):
        return best
    fastest, tails = times.step, _tails(step)
    placed = sum(map(len, step.passes)) + (1 + step.trains) * sum(map(len, step.pieces))
    drafts: dict[_Habits, int] = {}  # and when they end
    waiting = deque(_FIRST)
    while waiting and len(drafts) < max(_LEAST, _PLACED // placed):
        habits = waiting.popleft()
        draft = _Draft(step, tails, habits)
        draft.fill()
        drafts[habits] = draft.ends
        if draft.ends < fastest:
            best, fastest = draft.plan(), draft.ends
        if not waiting:
            closest = min(drafts, key=drafts.__getitem__)
            waiting.extend(each for each in closest.neighbours() if each not in drafts)
    return best


def separated(step: Step) -> EncoderPlan:
    """All pieces before the decoder's schedule, all backwards behind it; balanced by cost."""
    names = step.names
    costs = [step.encoding(*name) for name in names]
    work: list[list[EncoderWork]] = [[] for _ in step.replicas]
    owners = balanced(costs, len(step.replicas), threshold=0)
    for forward in (True, False) if step.trains else (True,):
        for owner, (microbatch, piece) in zip(owners, names, strict=True):
            before = 0 if forward else len(step.passes[step.replicas[owner]])
            work[owner].append(EncoderWork(before, forward, microbatch, piece))
    return EncoderPlan(work=tuple(map(tuple, work)), streamed=False)


@dataclass(frozen=True, kw_only=True)
class _Habits:
    """How a draft decides; which are best depends on the step.

    The decoder's first forward may wait until ``start`` sixteenths of the encoders' forward could
    be done. Encoder work may end so late that the decoder is through ``late`` quarters of a piece's
    backward later than it could be. With ``urgent`` it may make the decoder wait where the first
    stage would soon wait for its features. A replica encodes up to the mean of all, and ``extra``
    halves of a piece beyond.
    """

    start: int
    late: int
    urgent: bool
    extra: int

    def neighbours(self) -> list["_Habits"]:
        """Those that differ a little."""
        return [
            replace(self, start=max(0, self.start + start), late=max(0, self.late + late))
            for start, late in ((1, 0), (-1, 0), (0, 1), (0, -1), (2, 0), (-2, 0))
        ]


# Found by trying many on steps of 2 to 8 stages, 8 to 32 microbatches and 1 to 8 pieces.
_FIRST = (
    _Habits(start=2, late=2, urgent=True, extra=1),
    _Habits(start=0, late=2, urgent=True, extra=0),
    _Habits(start=8, late=1, urgent=False, extra=1),
    _Habits(start=0, late=2, urgent=False, extra=1),
    _Habits(start=0, late=0, urgent=False, extra=1),
    _Habits(start=4, late=4, urgent=False, extra=1),
    _Habits(start=2, late=1, urgent=True, extra=0),
    _Habits(start=10, late=4, urgent=False, extra=1),
    _Habits(start=4, late=2, urgent=False, extra=1),
    _Habits(start=2, late=6, urgent=False, extra=1),
    _Habits(start=10, late=8, urgent=False, extra=1),
    _Habits(start=0, late=3, urgent=False, extra=3),
)


class _Draft:
    """A plan in the making: whoever is free takes what fits, from the step's begin to its end.

    A rank that waits for the decoder does encoder work that is done before the pass has to begin:
    when its input is there, or, if that is later, when a pass must begin for the decoder to be
    through in time. Pieces are encoded in their order by whoever comes first.
    """

    def __init__(self, step: Step, tails: dict[DecoderPass, int], habits: _Habits) -> None:
        self._step, self._tails, self._urgent = step, tails, habits.urgent
        replicas = range(len(step.replicas))
        costs = [step.pieces[microbatch][piece] for microbatch, piece in step.names]
        phase = sum(cost.forward for cost in costs) // len(replicas)
        piece = max(cost.backward if step.trains else cost.forward for cost in costs)
        self._target = max(tails.values()) + phase * habits.start // 16 + piece * habits.late // 4
        encoding = [step.encoding(*name) for name in step.names]
        decoding = [step.decoding[stage] for stage in step.replicas]
        mean = -(-(sum(encoding) + sum(decoding)) // len(replicas))
        extra = max(encoding) * habits.extra // 2
        self._room = [mean + extra - each for each in decoding]  # for more pieces, by cost
        self._events: list[tuple[int, int]] = []  # when to look at a replica
        self._free = [0 for _ in replicas]
        self._ready = [False for _ in replicas]  # for the next pass
        self._next = [0 for _ in step.passes]
        self._ends: dict[DecoderPass, int] = {}
        self._to_encode = deque(step.names)
        self._missing = [len(pieces) for pieces in step.pieces]
        self._features = [0 for _ in step.pieces]  # when the latest piece of a microbatch is there
        self._owners: list[set[int]] = [set() for _ in step.pieces]
        self._to_go_backward: list[deque[tuple[int, int]]] = [deque() for _ in replicas]
        self._work: list[list[EncoderWork]] = [[] for _ in replicas]

    @property
    def ends(self) -> int:
        """When all is done."""
        return max([*self._free, *self._ends.values()])

    def plan(self) -> EncoderPlan:
        """What has been placed."""
        return EncoderPlan(work=tuple(map(tuple, self._work)), streamed=True)

    def fill(self) -> None:
        """Place all there is."""
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
                replica = max(replicas, key=lambda each: (self._room[each], -each))
                self._ready[replica] = False
                self._encode(replica, now)

    def _look(self, when: int, replicas: Iterable[int]) -> None:
        for replica in replicas:
            heappush(self._events, (when, replica))

    def _decide(self, replica: int, now: int) -> None:
        stage = self._step.replicas[replica]
        passes, here = self._step.passes[stage], self._next[stage]
        one = passes[here] if here < len(passes) else None
        comes = None if one is None else self._comes(one)
        bound = None
        if one is not None:
            bound = max(self._target - self._tails[one], 0 if comes is None else comes)
        if self._may_encode(replica, now, bound):
            self._encode(replica, now)
        elif self._may_go_backward(replica, now, bound):
            self._go_backward(replica, now)
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

    def _may_encode(self, replica: int, now: int, bound: int | None) -> bool:
        if not self._to_encode or self._room[replica] <= 0:
            return False
        microbatch, piece = self._to_encode[0]
        end = now + self._step.pieces[microbatch][piece].forward
        needed = self._target - self._tails[DecoderPass(True, 0, microbatch)]
        return bound is None or end <= bound or (self._urgent and end > needed)

    def _may_go_backward(self, replica: int, now: int, bound: int | None) -> bool:
        if not self._to_go_backward[replica]:
            return False
        microbatch, piece = self._to_go_backward[replica][0]
        came = self._ends.get(DecoderPass(False, 0, microbatch))
        end = now + self._step.pieces[microbatch][piece].backward
        return came is not None and came <= now and (bound is None or end <= bound)

    def _encode(self, replica: int, now: int) -> None:
        microbatch, piece = self._to_encode.popleft()
        end = now + self._step.pieces[microbatch][piece].forward
        self._place(replica, EncoderWork(self._here(replica), True, microbatch, piece), end)
        self._room[replica] -= self._step.encoding(microbatch, piece)
        if self._step.trains:
            self._to_go_backward[replica].append((microbatch, piece))
            self._owners[microbatch].add(replica)
        self._missing[microbatch] -= 1
        self._features[microbatch] = max(self._features[microbatch], end)
        if not self._missing[microbatch]:
            self._look(now, self._step.lanes[0])
            self._look(self._features[microbatch], self._step.lanes[0])

    def _go_backward(self, replica: int, now: int) -> None:
        microbatch, piece = self._to_go_backward[replica].popleft()
        end = now + self._step.pieces[microbatch][piece].backward
        self._place(replica, EncoderWork(self._here(replica), False, microbatch, piece), end)

    def _here(self, replica: int) -> int:
        return self._next[self._step.replicas[replica]]

    def _place(self, replica: int, work: EncoderWork, end: int) -> None:
        self._work[replica].append(work)
        self._free[replica] = end
        self._look(end, [replica])

    def _decode(self, stage: int, one: DecoderPass, now: int) -> None:
        step = self._step
        end = self._ends[one] = now + step.cost(one)
        self._next[stage] += 1
        for replica in step.lanes[stage]:
            self._ready[replica], self._free[replica] = False, end
        self._look(end, step.lanes[stage])
        behind = step.behind(one)
        if behind is not None:
            others = step.lanes[behind.place % len(step.passes)]
            self._look(now, others)
            self._look(end, others)
        elif not one.forward:
            self._look(end, self._owners[one.microbatch])


def _tails(step: Step) -> dict[DecoderPass, int]:
    """From the begin of each pass to the end of the decoder's schedule at the earliest.

    A piece's backward that waits for a pass counts, too.
    """
    tails: dict[DecoderPass, int] = {}
    for stage, number, one in reversed(_in_turn(step)):
        behind = step.behind(one)
        longest = 0
        if behind is not None:
            longest = tails[behind]
        elif not one.forward and step.trains:
            longest = max((cost.backward for cost in step.pieces[one.microbatch]), default=0)
        if number + 1 < len(step.passes[stage]):
            longest = max(longest, tails[step.passes[stage][number + 1]])
        tails[one] = longest + step.cost(one)
    return tails


def _in_turn(step: Step) -> list[tuple[int, int, DecoderPass]]:
    """All passes with stage and number, each behind what it waits for."""
    found: list[tuple[int, int, DecoderPass]] = []
    done: set[DecoderPass | None] = {None}
    at, seen = [0 for _ in step.passes], -1
    while seen < len(found):
        seen = len(found)
        for stage, passes in enumerate(step.passes):
            while at[stage] < len(passes) and step.before(passes[at[stage]]) in done:
                one = passes[at[stage]]
                done.add(one)
                found.append((stage, at[stage], one))
                at[stage] += 1
    assert len(found) == sum(map(len, step.passes)), "Megatron's order never waits for itself"
    return found
