"""Which pairs of queries and keys an attention has to compute, as rectangles and triangles."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from loongplug.context.segments import Segments
from loongplug.context.token_split import ContextShard


@dataclass(frozen=True)
class Tile:
    """Neighbouring queries and the neighbouring keys they see, by their places in their parts.

    All queries see all keys; with ``causal``, as many keys as queries, and query i sees keys 0 to
    i. A tile is never empty.
    """

    queries: slice
    keys: slice
    causal: bool

    @property
    def shape(self) -> tuple[int, int, bool]:
        """Queries, keys and whether causal: equal ones can be computed as one batch."""
        size_q, size_k = (each.stop - each.start for each in (self.queries, self.keys))
        return size_q, size_k, self.causal


TileGroups = tuple[tuple[Tile, ...], ...]  # by shape; no two of a group have a query in common


def tiles(queries: ContextShard, keys: ContextShard, segments: Segments) -> tuple[Tile, ...]:
    """The pairs of ``queries`` and ``keys`` that see each other, each in exactly one tile.

    The parts are of one split of the row that ``segments`` cut, or whole rows. So a stretch of
    queries is either among the keys as a whole, or not at all.
    """
    # The stretches of queries, once they are cut where segments end.
    edges = np.unique(np.concatenate((queries.starts, queries.stops, segments.bounds)))
    starts, stops = edges[:-1], edges[1:]
    held = queries.before(stops) > queries.before(starts)
    starts, stops = starts[held], stops[held]
    own = queries.before(starts)
    first, diagonal, last = map(keys.before, (segments.starts(starts), starts, stops))
    found = []
    for q, size, first_k, diagonal_k, last_k in np.stack(
        (own, stops - starts, first, diagonal, last), axis=1
    ).tolist():
        rows = slice(q, q + size)
        if first_k < diagonal_k:
            found.append(Tile(rows, slice(first_k, diagonal_k), causal=False))
        if diagonal_k < last_k:
            assert last_k - diagonal_k == size, "queries that are among the keys in part"
            found.append(Tile(rows, slice(diagonal_k, last_k), causal=True))
    return tuple(found)


def grouped(tiles: Iterable[Tile]) -> TileGroups:
    """``tiles`` by their shape, in the order of the first of each."""
    groups: dict[tuple[int, int, bool], list[Tile]] = {}
    for tile in tiles:
        groups.setdefault(tile.shape, []).append(tile)
    return tuple(map(tuple, groups.values()))
