"""The rows that each part of a split sequence needs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.hetero.routes import sequence_shards, size

pytestmark = pytest.mark.quick


@st.composite
def visual_places(draw):
    """Where the visual tokens of some rows lie, and how the sequence is split: cp, and tp of it."""
    cp, tp = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    length = cp * tp * draw(st.integers(1, 6))
    rows = draw(st.lists(st.sets(st.integers(0, length - 1)), max_size=4))
    split = TokenSplit.whole(length) if cp == 1 else zigzag(length, cp=cp)
    return [np.array(sorted(row), dtype=np.int64) for row in rows], split, tp


@settings(max_examples=60, deadline=None)
@given(visual_places())
def test_each_part_gets_the_tokens_that_lie_in_it_in_their_order(made):
    places, split, tp = made
    shards = sequence_shards(places, split=split, tp=tp)
    assert len(shards) == len(split.parts) * tp
    position = np.concatenate([np.zeros(0, dtype=np.int64), *places])
    for part, rows in enumerate(shards):
        # What the rank holds, place by place, and of that its chunk.
        held = np.split(split.parts[part // tp].places, tp)[part % tp]
        expected = np.isin(position, held).nonzero()[0].tolist()
        taken = [token for each in rows for token in range(each.start, each.stop)]
        assert taken == expected
        assert size(rows) == len(expected)
    # One run of rows for each row of the microbatch at most, and there two of a zigzag: they are
    # sent as such.
    stretches = max(len(part.starts) for part in split.parts)
    assert all(len(rows) <= len(places) * stretches for rows in shards)
