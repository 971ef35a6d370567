"""Who encodes which piece when, so that the encoder works while the decoder would wait. Pure.

:func:`streamed` puts encoder work into the pipeline's bubble: stages encode while their first
activations or first gradients are not there yet, and go backward through the encoder in the
schedule's cool-down. What is left is done before the schedule and behind it.

Costs are integers that every rank counts, so that all come to the same plan without a word. A
replica encodes, sends and goes backward through its pieces in the order of microbatches and within
each; the first stage takes features and gives gradients back in the same. So the sends and receives
of a pair of ranks are in one order on both sides, in each direction. Nobody waits for these sends.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from loongplug.hetero.balance import cut, in_passes
from loongplug.hetero.operations import EncoderWork
from loongplug.hetero.step_programs import FREE, DecoderPass, EncoderPlan, Name, Step, plan_time

# By replica, of each piece: before which pass it goes forward, and backward.
_Places = list[dict[Name, list[int]]]


# How drafts decide; which is best depends on the step. The decoder's first forward may wait until
# ``start`` sixteenths of the encoder's forward could be done. Encoder work may end so late that the
# decoder is through ``late`` quarters of a piece's backward later than it could be. A replica
# encodes up to the mean of all, and ``extra`` halves of a piece beyond. Chosen of 65 by measuring
# them on 368 steps of 2 to 8 stages: even and uneven, of several replicas and virtual stages, of
# passes that cost nothing to three pieces each.
_HABITS = ((0, 0, 3), (2, 0, 0), (8, 1, 3), (12, 1, 3), (12, 3, 0))


def streamed(step: Step, *, otherwise: int) -> EncoderPlan | None:
    """The fastest plan of a few by the clock; None where none ends before ``otherwise``.

    One stage never streams, for its pipeline never waits.
    """
    best = None
    if len(step.passes) == 1 or not any(step.pieces):
        return best
    for plan in _plans(step):
        ends = plan_time(step, plan)
        if ends is not None and ends < otherwise:
            best, otherwise = plan, ends
    return best


def _plans(step: Step) -> Iterator[EncoderPlan]:
    """What is tried; of two that are equally fast, the first has fewer passes."""
    yield from (_blocks(step, last) for last in (0, 1))
    tails = _tails(step)
    drafted = [step]
    if any(step.encoder.each):  # which pieces that are joined take once: also as if it were nothing
        drafted.append(replace(step, encoder=replace(step.encoder, each=FREE)))
    for each, habits in product(drafted, _HABITS):
        yield _plan(step, _Draft(each, tails, *habits).places())


def _blocks(step: Step, last: int) -> EncoderPlan:
    """Neighbours to each replica, evenly dealt: before its first pass, and back behind its last.

    The first replica has ``last``, 0 or 1, of the last microbatches, whose gradients come when it
    is through, and less of the first ones: it decodes them while the others still encode.
    """
    places: _Places = [{} for _ in step.replicas]
    turned = sorted(step.names, key=lambda name: name[0] < len(step.pieces) - last)
    decoding = last * (step.forward[0] + step.backward[0])
    blocks = cut([decoding, *(step.encoding(*name) for name in turned)], len(places))
    for own, block, stage in zip(places, blocks, step.replicas, strict=False):
        for name in sorted(turned[max(block.start, 1) - 1 : block.stop - 1]):
            own[name] = [0, len(step.passes[stage])] if step.encoder.trains else [0]
    return _plan(step, places)


def _tails(step: Step) -> dict[DecoderPass, int]:
    """From each pass's begin to the end of the schedule, and of what waits for it, at the least."""
    found: dict[DecoderPass, int] = {}
    left = [[*passes] for passes in step.passes]
    own = [0 for _ in left]  # by stage, of its next pass
    while any(left):
        for stage, passes in enumerate(left):
            while passes and ((behind := step.behind.get(passes[-1])) is None or behind in found):
                one = passes.pop()
                costs = [cost.backward for cost in step.pieces[one.microbatch]]
                if behind is not None:
                    own[stage] = max(own[stage], found[behind])
                elif step.encoder.trains and costs:
                    own[stage] = max(own[stage], step.encoder.each.backward + max(costs))
                found[one] = own[stage] = own[stage] + step.cost(one)
    return found


class _Draft:
    """A plan in the making: whoever is free takes what fits, from the step's begin to its end.

    A rank that waits for the decoder does encoder work that ends before its next pass has to begin
    for the decoder to be through in time. What the first stage would soon wait for may make the
    decoder wait. Pieces are encoded in their order, by whoever comes first.
    """

    def __init__(
        self, step: Step, tails: Mapping[DecoderPass, int], start: int, late: int, extra: int
    ) -> None:
        self._step, self._tails = step, tails
        costs = [step.pieces[microbatch][piece] for microbatch, piece in step.names]
        phase = sum(cost.forward for cost in costs) // len(step.replicas)
        piece = max(cost.backward if step.encoder.trains else cost.forward for cost in costs)
        self._target = max(tails.values()) + phase * start // 16 + piece * late // 4
        encoding = [step.encoding(*name) for name in step.names]
        decoding = [step.decoding[stage] for stage in step.replicas]
        mean = -(-sum((*encoding, *decoding)) // len(decoding))
        beyond = max(encoding) * extra // 2
        self._room = [mean + beyond - each for each in decoding]  # for more pieces, by cost
        self._free = [0 for _ in decoding]
        self._next = [0 for _ in step.passes]
        self._ends: dict[DecoderPass | Name, int] = {}  # of passes and of pieces' forwards
        self._to_encode = deque(step.names)
        # By replica, whose graphs go back in the order in which they were made.
        self._to_go_backward = [deque[Name]() for _ in decoding]
        self._places: _Places = [{} for _ in decoding]

    def places(self) -> _Places:
        now, stages = 0, range(len(self._next))
        while True:
            while sum(self._goes_on(stage, now) for stage in stages):
                pass
            later = [end for end in self._free if end > now]
            if not later:
                return self._places
            now = min(later)

    def _goes_on(self, stage: int, now: int) -> bool:
        """Whether somebody of a stage begins something."""
        step, lanes = self._step, self._step.lanes[stage]
        idle = [replica for replica in lanes if self._free[replica] <= now]
        if not idle:
            return False
        passes, here = step.passes[stage], self._next[stage]
        one = passes[here] if here < len(passes) else None
        comes = None if one is None else self._comes(one)
        bound = inf if one is None else max(self._target - self._tails[one], comes or 0)
        if sum(self._encodes(replica, now, bound) for replica in idle):
            return True
        if one is None or comes is None or comes > now or len(idle) < len(lanes):
            return False
        self._next[stage] += 1
        self._ends[one] = now + step.cost(one)
        for replica in lanes:
            self._free[replica] = self._ends[one]
        return True

    def _comes(self, one: DecoderPass) -> int | None:
        """When the input of a pass is there; None for not yet known."""
        before = self._step.before(one)
        if before is not None:
            return self._ends.get(before)
        if self._to_encode and self._to_encode[0][0] == one.microbatch:
            return None
        own = range(len(self._step.pieces[one.microbatch]))
        return max((self._ends[one.microbatch, piece] for piece in own), default=0)

    def _encodes(self, replica: int, now: int, bound: float) -> bool:
        """Whether a replica begins a piece's forward, or else a backward, that ends in time."""
        step, queue = self._step, self._to_go_backward[replica]
        if self._to_encode:
            name = self._to_encode[0]
            takes = step.encoding(*name)
            if self._room[replica] > 0 or not takes:
                end = now + step.encoder_pass([name], forward=True)
                if end <= bound or end > self._target - self._tails[DecoderPass(True, 0, name[0])]:
                    self._to_encode.popleft()
                    self._room[replica] -= takes
                    self._places[replica][name] = [self._next[step.replicas[replica]]]
                    self._ends[name] = self._free[replica] = end
                    if step.encoder.trains:
                        queue.append(name)
                    return True
        if queue:
            came = self._ends.get(DecoderPass(False, 0, queue[0][0]), inf)
            end = now + step.encoder_pass([queue[0]], forward=False)
            if came <= now and end <= bound:
                self._places[replica][queue.popleft()].append(self._next[step.replicas[replica]])
                self._free[replica] = end
                return True
        return False


def _plan(step: Step, places: _Places) -> EncoderPlan:
    """Pieces that go before the same passes, there and back, are joined, where that saves a pass's
    own costs; else the first of them need not wait for the last."""
    most = step.encoder.joined if any(step.encoder.each) else None

    def work(places: Mapping[Name, Sequence[int]]) -> tuple[EncoderWork[Name], ...]:
        lots: defaultdict[tuple[int, ...], list[Name]] = defaultdict(list)
        for name, before in places.items():
            lots[tuple(before)].append(name)
        found = []
        for befores, names in lots.items():
            costs = [step.pieces[microbatch][piece].forward for microbatch, piece in names]
            for pieces in in_passes(names, costs, most=most):
                found += [EncoderWork(at, not way, pieces) for way, at in enumerate(befores)]
        return tuple(sorted(found, key=lambda one: (one.before, not one.forward, one.pieces)))

    return tuple(map(work, places))
