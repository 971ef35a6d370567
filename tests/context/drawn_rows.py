"""Rows of hypothesis' choice: their segments, and how they are split over ranks."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from loongplug.context.balance import balanced
from loongplug.context.segments import Segments
from loongplug.context.token_split import TokenSplit, zigzag

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any)
RANKS = st.integers(1, 7)
# The most tokens of a block, or a zigzag. Few tokens a block cut segments in many ways.
SPLITS = st.sampled_from(["zigzag", 1, 2, 3, 5])


def split_row(lengths: list[int], *, cp: int, how: str | int) -> tuple[TokenSplit, Segments]:
    """The row's split, and its segments with the padding."""
    row = Segments.of(lengths)
    split = zigzag(row.length, cp=cp) if how == "zigzag" else balanced(row, cp=cp, block=int(how))
    return split, Segments.of(lengths, padded_to=split.length)


def seen(lengths: list[int], *, padded_to: int) -> NDArray[np.bool_]:
    """The mask of a row, [query, key], written out: a segment's number for each token."""
    lengths = [*lengths, padded_to - sum(lengths)]
    segment = np.repeat(np.arange(len(lengths)), lengths)
    return np.tril(segment[:, None] == segment)
