"""Layers in a row, split into stages such that the slowest stage is as fast as can be. Pure."""

from collections.abc import Callable

# Stages' costs, the largest first, and how many layers each stage has.
_Found = tuple[tuple[int, ...], tuple[int, ...]]


def split(layers: int, *, stages: int, cost: Callable[[int, int], int]) -> tuple[int, ...]:
    """How many of so many ``layers`` each of ``stages`` takes, one or more, in their order.

    ``cost(start, stop)`` is what a stage with the layers from ``start`` to before ``stop`` takes;
    it is asked once for each pair. The slowest stage takes the least that is possible; of all such
    splits, the second slowest does, and so on. Of those that are equal in all this, it is the one
    with fewer layers in front, where a pipeline keeps the most activations.

    Exact, by dynamic programming over where stages end: what is put behind a prefix, the better
    prefix stays the better one.

    >>> split(4, stages=2, cost=lambda start, stop: sum([3, 1, 1, 1][start:stop]))
    (1, 3)

    Raises:
        ValueError: there are more stages than layers, or not one.
    """
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers cannot be split into {stages} stages: expected 1 to {layers} of them"
        )
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
