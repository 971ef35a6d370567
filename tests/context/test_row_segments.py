"""Segments of a row, and their pairs in closed form."""

import numpy as np
import pytest
from drawn_rows import LENGTHS, seen
from hypothesis import given
from hypothesis import strategies as st

from loongplug.context.segments import Segments


@pytest.mark.quick
@given(LENGTHS, st.integers(0, 5))
def test_pairs_before_a_place_are_those_of_the_written_out_mask(
    lengths: list[int], padding: int
) -> None:
    length = sum(lengths) + padding
    segments = Segments.of(lengths, padded_to=length)
    counted = np.concatenate(([0], seen(lengths, padded_to=length).sum(1).cumsum()))
    assert (segments.pairs_before(np.arange(length + 1)) == counted).all()
    assert segments.lengths == tuple(filter(None, [*lengths, padding]))
    assert segments.length == length


def test_pairs_of_long_rows_do_not_overflow() -> None:
    length = 1 << 30
    assert Segments.of([length]).pairs_before(np.array([length])) == [length * (length + 1) // 2]
