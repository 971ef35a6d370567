"""A plan of who encodes which piece when, drawn up from a step's begin to its end. Pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice

from loongplug.hetero.pipeline_clock import (
    DecoderPass,
    EncoderPlan,
    EncoderWork,
    Name,
    Step,
)


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How a draft decides; which are best depends on the step.

    The decoder's first forward may wait until ``start`` sixteenths of the encoders' forward could
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
    together: int = 0

    def neighbours(self) -> list["Habits"]:
        """Those that differ a little."""
        changed = [
            replace(self, start=max(0, self.start + start), late=max(0, self.late + late))
            for start, late in ((1, 0), (-1, 0), (0, 1), (0, -1), (2, 0), (-2, 0))
        ]
        if not self.together:
            return changed
        sizes = (replace(self, together=max(1, self.together + more)) for more in (1, -1))
        return [*sizes, *changed]


class Draft:
    """A plan in the making: whoever is free takes what fits, from the step's begin to its end.

    A rank that waits for the decoder does encoder work that is done before the pass has to begin:
    when its input is there, or, if that is later, when a pass must begin for the decoder to be
    through in time. Pieces are encoded in their order, by whoever comes first.
    """

    def __init__(self, step: Step, tails: dict[DecoderPass, int], habits: Habits) -> None:
        self._step, self._tails, self._habits = step, tails, habits
        replicas = range(len(step.replicas))
        costs = [step.pieces[microbatch][piece] for microbatch, piece in step.names]
        phase = sum(cost.forward for cost in costs) // len(replicas)
        piece = max(
            cost.backward if step.encoder(name).trains else cost.forward
            for name, cost in zip(step.names, costs, strict=True)
        )
        self._target = max(tails.values()) + phase * habits.start // 16 + piece * habits.late // 4
        encoding = [step.encoding(*name) for name in step.names]
        decoding = [step.decoding[stage] for stage in step.replicas]
        mean = -(-(sum(encoding) + sum(decoding)) // len(replicas))
        extra = max(encoding) * habits.extra // 2
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
        self._owners: list[set[int]] = [set() for _ in step.pieces]
        # By replica and encoder: each one's graphs go back in the order in which they were made.
        self._to_go_backward: list[list[deque[tuple[Name, ...]]]] = [
            [deque() for _ in step.encoders] for _ in replicas
        ]
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
                replica = max(replicas, key=lambda at: (self._room[at], -at))
                self._ready[replica] = False
                self._encode(replica, now, self._to_encode[0])

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
        names = self._may_encode(replica, now, bound)
        if names:
            self._encode(replica, now, *names)
        elif (kind := self._may_go_backward(replica, now, bound)) is not None:
            self._go_backward(replica, now, kind)
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

    def _may_encode(self, replica: int, now: int, bound: int | None) -> list[Name]:
        """Which pieces in one pass: the next one, and more for the same encoder."""
        step, room, queue = self._step, self._room[replica], self._to_encode
        found: list[Name] = []
        if not queue:
            return found
        kind, encoder = step.kind(queue[0]), step.encoder(queue[0])
        end, taken = now + encoder.each.forward, 0
        for name in islice((x for x in queue if step.kind(x) == kind), self._together):
            takes = step.pieces[name[0]][name[1]].forward
            end, taken = end + takes, taken + takes
            if room <= 0 or (found and taken > encoder.joined):
                break
            needed = self._target - self._tails[DecoderPass(True, 0, name[0])]
            urgent = self._habits.urgent and end > needed
            if not (bound is None or end <= bound or urgent):
                break
            room -= step.encoding(*name)
            found.append(name)
        return found

    def _may_go_backward(self, replica: int, now: int, bound: int | None) -> int | None:
        """Through which encoder: of those whose gradients are there, where they have been longest.

        None for not now.
        """
        found: list[tuple[int, int]] = []
        for kind, queue in enumerate(self._to_go_backward[replica]):
            if not queue:
                continue
            came = self._ends.get(DecoderPass(False, 0, queue[0][-1][0]))
            if came is None or came > now:
                continue
            takes = self._step.encoder_pass(EncoderWork(0, False, queue[0]))
            if bound is None or now + takes <= bound:
                found.append((came, kind))
        return min(found)[1] if found else None

    def _encode(self, replica: int, now: int, *names: Name) -> None:
        for name in names:
            self._to_encode.remove(name)
        end = self._place(replica, EncoderWork(self._here(replica), True, names), now)
        if self._step.encoder(names[0]).trains:
            self._to_go_backward[replica][self._step.kind(names[0])].append(names)
            self._owners[names[-1][0]].add(replica)
        for microbatch, piece in names:
            self._room[replica] -= self._step.encoding(microbatch, piece)
            self._missing[microbatch] -= 1
            self._features[microbatch] = max(self._features[microbatch], end)
            if not self._missing[microbatch]:
                self._look(now, self._step.lanes[0])
                self._look(self._features[microbatch], self._step.lanes[0])

    def _go_backward(self, replica: int, now: int, kind: int) -> None:
        names = self._to_go_backward[replica][kind].popleft()
        self._place(replica, EncoderWork(self._here(replica), False, names), now)

    def _here(self, replica: int) -> int:
        return self._next[self._step.replicas[replica]]

    def _place(self, replica: int, work: EncoderWork, now: int) -> int:
        """When it ends."""
        end = now + self._step.encoder_pass(work)
        self._work[replica].append(work)
        self._free[replica] = end
        self._look(end, [replica])
        return end

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


def tails_of(step: Step) -> dict[DecoderPass, int]:
    """From the begin of each pass to the end of the decoder's schedule at the earliest.

    A piece's backward that waits for a pass counts, too.
    """
    tails: dict[DecoderPass, int] = {}
    for stage, number, one in reversed(step.in_turn):
        behind = step.behind(one)
        longest = 0
        if behind is not None:
            longest = tails[behind]
        elif not one.forward:
            costs = step.pieces[one.microbatch]
            encoders = [step.encoder((one.microbatch, piece)) for piece in range(len(costs))]
            longest = max(
                (
                    encoder.each.backward + cost.backward
                    for encoder, cost in zip(encoders, costs, strict=True)
                    if encoder.trains
                ),
                default=0,
            )
        if number + 1 < len(step.passes[stage]):
            longest = max(longest, tails[step.passes[stage][number + 1]])
        tails[one] = longest + step.cost(one)
    return tails
