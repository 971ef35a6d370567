"""Tiles against masks that are written out."""

import numpy as np
import pytest
from drawn_rows import LENGTHS, RANKS, SPLITS, seen, split_row
from hypothesis import given
from numpy.typing import NDArray

from loongplug.context.segments import Segments
from loongplug.context.tiles import Tile, grouped, tiles
from loongplug.context.token_split import ContextShard, zigzag


def painted(
    found: tuple[Tile, ...], queries: ContextShard, keys: ContextShard
) -> NDArray[np.int64]:
    """How often the tiles have each pair of a query and a key."""
    times = np.zeros((queries.tokens, keys.tokens), dtype=np.int64)
    for tile in found:
        size_q, size_k, causal = tile.shape
        assert size_q > 0
        assert size_k > 0
        assert size_q == size_k or not causal
        pairs = np.ones((size_q, size_k), dtype=np.int64)
        times[tile.queries, tile.keys] += np.tril(pairs) if causal else pairs
    return times


@pytest.mark.quick
@given(LENGTHS, RANKS, SPLITS)
def test_tiles_have_each_pair_once_and_no_other(
    lengths: list[int], cp: int, how: str | int
) -> None:
    split, segments = split_row(lengths, cp=cp, how=how)
    mask = seen(lengths, padded_to=split.length)
    for queries in split.parts:
        for keys in (*split.parts, ContextShard.whole(split.length)):
            times = painted(tiles(queries, keys, segments), queries, keys)
            assert (times == mask[np.ix_(queries.places, keys.places)]).all()


@given(LENGTHS, RANKS, SPLITS)
def test_tiles_of_a_group_have_one_shape_and_no_query_in_common(
    lengths: list[int], cp: int, how: str | int
) -> None:
    split, segments = split_row(lengths, cp=cp, how=how)
    for queries in split.parts:
        found = tiles(queries, ContextShard.whole(split.length), segments)
        groups = grouped(found)
        assert sorted(map(hash, found)) == sorted(hash(tile) for each in groups for tile in each)
        for group in groups:
            assert len({tile.shape for tile in group}) == 1
            rows = np.concatenate([np.r_[tile.queries] for tile in group])
            assert len(rows) == len(set(rows.tolist()))


def test_a_causal_row_needs_few_tiles() -> None:
    split = zigzag(64, cp=4)
    found = tiles(split.parts[1], ContextShard.whole(64), Segments.of([64]))
    assert found == (
        Tile(slice(0, 8), slice(0, 8), causal=False),
        Tile(slice(0, 8), slice(8, 16), causal=True),
        Tile(slice(8, 16), slice(0, 48), causal=False),
        Tile(slice(8, 16), slice(48, 56), causal=True),
    )
