"""The rows that each rank of a split sequence needs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongplug.hetero.routes import sequence_shards, size

pytestmark = pytest.mark.quick


@st.composite
def visual_places(draw):
    """Where the visual tokens of some rows lie, and how the sequence is split."""
    parts = draw(st.sampled_from([1, 2, 4]))
    length = parts * draw(st.integers(1, 6))
    rows = draw(st.lists(st.sets(st.integers(0, length - 1)), max_size=4))
    return [np.array(sorted(row), dtype=np.int64) for row in rows], length, parts


@settings(max_examples=60, deadline=None)
@given(visual_places())
def test_each_part_gets_the_tokens_that_lie_in_it_in_their_order(made):
    places, length, parts = made
    shards = sequence_shards(places, length=length, parts=parts)
    assert len(shards) == parts
    position = np.concatenate([np.zeros(0, dtype=np.int64), *places])
    for part, rows in enumerate(shards):
        expected = (position // (length // parts) == part).nonzero()[0].tolist()
        taken = [token for each in rows for token in range(each.start, each.stop)]
        assert taken == expected
        assert size(rows) == len(expected)
    # One run of rows for each row of the microbatch at most: they are sent as such.
    assert all(len(rows) <= len(places) for rows in shards)
