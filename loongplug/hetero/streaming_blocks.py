"""Plans in which each encoder replica has one pass or two, as where passes cost much. Pure.

Every replica encodes a block of neighbouring pieces before its first pass, later stages later
pieces, and more of them: their first activations come later, and they are through earlier. A second
block is encoded in the longest wait of a stage, between its first forwards and its first backward.
The first stage has the last pieces: it is through last, so that nobody else waits for what they
give back. All go backward behind their last pass.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loongplug.hetero.pieces import runs
from loongplug.hetero.step_costs import EncoderPlan, EncoderWork, Name, Step
from loongplug.hetero.step_programs import PassOnClock


@dataclass(frozen=True, kw_only=True)
class StageWaits:
    """Of a stage without encoders, of so many ``passes``.

    ``ends`` is how long it waits before its first pass and behind its last one, ``middle`` how
    long between its first forward and its first ``backward``, which has this number.
    """

    passes: int
    ends: int
    middle: int
    backward: int


def blocks(step: Step, of_stages: Sequence[StageWaits], *, fill: int) -> EncoderPlan:
    """Second blocks take ``fill`` quarters of the waits that they are for; with 0 there are none.

    ``of_stages`` are the step's :func:`waits_of`.

    The first stage has as many of the last microbatches as there are later stages: what does not
    fit into its second block goes with its first.
    """
    costs = [step.encoding(*name) for name in step.names]
    forward = sum(step.pieces[unit][piece].forward for unit, piece in step.names)
    waits = [of_stages[stage] for stage in step.replicas]
    more = [each.middle * fill * sum(costs) // (4 * max(1, forward)) for each in waits]
    free = [each.ends + room for each, room in zip(waits, more, strict=True)]
    quotas = _filled(free, sum(costs))
    second = [min(each, quota) for each, quota in zip(more, quotas, strict=True)]
    first = [quota - less for quota, less in zip(quotas, second, strict=True)]
    last = range(len(step.pieces) - len(step.passes) + 1, len(step.pieces))
    tail = sum(step.encoding(*name) for name in step.names if name[0] in last)
    tails = [0 for _ in quotas]
    for replica in step.lanes[0]:
        tails[replica] = min(first[replica], max(0, tail // len(step.lanes[0]) - second[replica]))
        first[replica] -= tails[replica]
    others = [each for each in reversed(range(len(quotas))) if each not in step.lanes[0]]
    rooms = [  # in the order of pieces, which is that of each replica's passes, too
        *((replica, 0, room) for replica, room in enumerate(first)),
        *((replica, waits[replica].backward, second[replica]) for replica in others),
        *((replica, 0, tails[replica]) for replica in step.lanes[0]),
        *((replica, waits[replica].backward, second[replica]) for replica in step.lanes[0]),
    ]
    dealt = _dealt([room for _, _, room in rooms], costs)
    work = []
    for replica, wait in enumerate(waits):
        own: dict[int, list[Name]] = {0: [], wait.backward: []}
        for name, place in zip(step.names, dealt, strict=True):
            if rooms[place][0] == replica:
                own[rooms[place][1]].append(name)
        work.append(_work(step, own, behind=wait.passes))
    return EncoderPlan(work=tuple(work), streamed=True)


def at_the_ends(step: Step, owned: Sequence[Sequence[Name]]) -> tuple[tuple[EncoderWork, ...], ...]:
    """By replica: its ``owned`` pieces before its first pass, and all back behind its last."""
    return tuple(
        _work(step, {0: names}, behind=len(step.passes[stage]))
        for names, stage in zip(owned, step.replicas, strict=True)
    )


def joined_passes(step: Step, names: Sequence[Name]) -> list[tuple[Name, ...]]:
    """Pieces of one replica that nothing keeps apart, in as few passes as there may be."""
    costs = [step.pieces[unit][piece].forward for unit, piece in names]
    return [tuple(names[each.start : each.stop]) for each in runs(costs, step.encoder.joined)]


def _work(
    step: Step, blocks: Mapping[int, Sequence[Name]], *, behind: int
) -> tuple[EncoderWork, ...]:
    """Of a replica, whose ``blocks`` are by the pass before which they are encoded."""
    lots = [
        (before, each) for before, names in blocks.items() for each in joined_passes(step, names)
    ]
    forwards = (EncoderWork(before, True, names) for before, names in lots)
    backwards = (EncoderWork(behind, False, names) for _, names in lots if step.encoder.trains)
    return (*forwards, *backwards)


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


def waits_of(step: Step, alone: Iterable[PassOnClock]) -> list[StageWaits]:
    """By stage, of the decoder ``alone``."""
    begins = {each.one: each.begin for each in alone}
    ends = [begins[passes[-1]] + step.cost(passes[-1]) for passes in step.passes]
    found = []
    for stage, passes in enumerate(step.passes):
        backward = next(number for number, one in enumerate(passes) if not one.forward)
        worked = sum(map(step.cost, passes[:backward]))
        found.append(
            StageWaits(
                passes=len(passes),
                ends=begins[passes[0]] + max(ends) - ends[stage],
                middle=begins[passes[backward]] - begins[passes[0]] - worked,
                backward=backward,
            )
        )
    return found
