"""Which of a unit's rows each consumer needs, where the sequence is split over them. Pure.

With sequence parallelism, rank t of a tensor parallel group of n holds the t-th of n equal parts
of the sequence, and so needs only the features of the visual tokens that lie there.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Rows = tuple[slice, ...]  # of a unit's features, ascending, without overlap


def sequence_shards(
    places: Sequence[NDArray[np.int64]], *, length: int, parts: int
) -> tuple[Rows, ...]:
    """The rows that each of ``parts`` ranks needs; one slice per row of the microbatch.

    Args:
        places: of each row of the microbatch, where its visual tokens lie, ascending.
        length: of the sequence, with padding.
    """
    assert length % parts == 0, (length, parts)
    bounds = np.arange(parts + 1) * (length // parts)
    shards: list[list[slice]] = [[] for _ in range(parts)]
    start = 0
    for row in places:
        cuts = (start + np.searchsorted(row, bounds)).tolist()
        for shard, (first, behind) in zip(shards, pairwise(cuts), strict=True):
            if behind > first:
                shard.append(slice(first, behind))
        start += len(row)
    return tuple(tuple(shard) for shard in shards)


def size(rows: Rows) -> int:
    """How many rows these are."""
    return sum(each.stop - each.start for each in rows)
