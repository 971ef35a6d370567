"""Layers in a row, split into stages such that the slowest stage is as fast as can be. Pure."""

from collections.abc import Callable
from functools import cache
from itertools import accumulate, pairwise, permutations

# Stages' costs, the largest first, and how many layers each stage has.
_Found = tuple[tuple[int, ...], tuple[int, ...]]


def split(
    layers: int, *, stages: int, cost: Callable[[int, int], int], chunks: int = 1
) -> tuple[int, ...]:
    """How many of so many ``layers`` each of ``stages`` takes, one or more, in their order.

    ``cost(start, stop)`` is what a stage with the layers from ``start`` to before ``stop`` takes;
    it is asked once for each pair. The slowest stage takes the least that is possible; of all such
    splits, the second slowest does, and so on. Of those that are equal in all this, it is the one
    with fewer layers in front, where a pipeline keeps the most activations.

    Exact, by dynamic programming over where stages end: what is put behind a prefix, the better
    prefix stays the better one.

    Where each stage has several ``chunks``, of which the n-th ones of all stages follow one
    another, the slowest stage takes the least with all of its chunks; then chunks count as stages
    do otherwise. A split of the chunks is made better there, one layer at a time, as long as that
    is possible: exact where layers cost the same.

    >>> split(4, stages=2, cost=lambda start, stop: sum([3, 1, 1, 1][start:stop]))
    (1, 3)

    Raises:
        ValueError: there are more stages than layers, or not one.
    """
    places = stages * chunks
    if not 1 <= places <= layers:
        raise ValueError(
            f"{layers} layers cannot be split into {places} stages: expected 1 to {layers} of them"
        )
    cost = cache(cost)

    def worth(sizes: tuple[int, ...]) -> tuple[list[int], list[int], tuple[int, ...]]:
        each = [cost(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        of_stages = [sum(each[stage::stages]) for stage in range(stages)]
        return sorted(of_stages, reverse=True), sorted(each, reverse=True), sizes

    found: tuple[int, ...] = ()
    better = _of_row(layers, stages=places, cost=cost)
    while chunks > 1 and better != found:
        found = better
        moved = [
            tuple(size + (place == taker) - (place == giver) for place, size in enumerate(found))
            for taker, giver in permutations(range(places), 2)
            if found[giver] > 1
        ]
        better = min([found, *moved], key=worth)
    return better


def _of_row(layers: int, *, stages: int, cost: Callable[[int, int], int]) -> tuple[int, ...]:
    """Of stages that have one chunk each."""
    best: list[_Found | None] = [((), ()), *[None] * layers]  # by the layers that are taken
    for stage in range(stages):
        left = stages - stage - 1
        ends: list[_Found | None] = [None] * (layers + 1)
        for stop in range(stage + 1, layers - left + 1):
            ends[stop] = min(
                _with(found, cost(start, stop), stop - start)
                for start, found in enumerate(best[:stop])
                if found is not None
            )
        best = ends
    found = best[layers]
    assert found is not None, "each stage has a layer"
    return found[1]


def _with(found: _Found, cost: int, size: int) -> _Found:
    costs, sizes = found
    return tuple(sorted((*costs, cost), reverse=True)), (*sizes, size)
