"""Media of a microbatch in pieces that several encoder replicas share, and units in passes. Pure.

A piece is a run of neighbouring media, so that its features are neighbouring rows, too. A medium is
never split.
"""

from collections.abc import Sequence
from itertools import accumulate


def cut(costs: Sequence[int], count: int) -> tuple[range, ...]:
    """Media of these costs in ``count`` pieces, or one each where there are fewer media.

    The largest piece is as small as can be. Pieces are in order, none is empty, and each medium, by
    its number, is in one of them. Without media there is none.

    >>> cut([1, 1, 1, 5, 1, 1], 3)
    (range(0, 3), range(3, 4), range(4, 6))
    """
    assert count > 0, count
    least, most = max([-(-sum(costs) // count), *costs]), sum(costs)
    while least < most:
        middle = (least + most) // 2
        if len(runs(costs, middle)) <= count:
            most = middle
        else:
            least = middle + 1
    found = runs(costs, most)
    while len(found) < min(count, len(costs)):
        # Smaller ones are easier to balance.
        largest = max(
            (place for place, run in enumerate(found) if len(run) > 1),
            key=lambda place: sum(costs[found[place].start : found[place].stop]),
        )
        found[largest : largest + 1] = _halves(costs, found[largest])
    return tuple(found)


def runs(costs: Sequence[int], largest: int) -> list[range]:
    """As few pieces as there can be of at most so much; a medium that costs more is one alone."""
    found, start, held = [], 0, 0
    for number, cost in enumerate(costs):
        if number > start and held + cost > largest:
            found.append(range(start, number))
            start, held = number, 0
        held += cost
    if costs:
        found.append(range(start, len(costs)))
    return found


def in_passes(rows: Sequence[int], *, joined_rows: int) -> list[range]:
    """A replica's units, with so many ``rows`` of input each, by the pass that they go in.

    So it is where a step does not stream. A pass has at most ``joined_rows``, or one unit. A unit
    without rows goes with any other.

    >>> in_passes([60, 0, 60, 40], joined_rows=100)
    [range(0, 2), range(2, 4)]
    """
    found: list[range] = []
    taken = 0  # rows of the last pass
    for number, each in enumerate(rows):
        if found and (0 in (each, taken) or taken + each <= joined_rows):
            found[-1] = range(found[-1].start, number + 1)
            taken += each
        else:
            found.append(range(number, number + 1))
            taken = each
    return found


def _halves(costs: Sequence[int], run: range) -> tuple[range, range]:
    """Of several media, as even as can be."""
    first = list(accumulate(costs[run.start : run.stop]))
    middle = min(run[1:], key=lambda at: abs(first[-1] - 2 * first[at - run.start - 1]))
    return range(run.start, middle), range(middle, run.stop)
