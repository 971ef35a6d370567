"""The planner of packs: what every pack holds, and that a planner can go on anywhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongplug.data.packing import Pack, PackingState, PackPlanner, packs_once

pytestmark = pytest.mark.quick

LENGTHS = st.lists(st.integers(0, 20), max_size=60)
SEQ_LENGTH = st.integers(20, 40)
LOOK_AHEAD = st.integers(1, 12)


@settings(deadline=None)
@given(LENGTHS, SEQ_LENGTH, LOOK_AHEAD)
def test_every_sample_is_in_one_pack_and_no_pack_is_too_long(lengths, seq_length, look_ahead):
    packs = list(packs_once(lengths, seq_length=seq_length, look_ahead=look_ahead))
    assert sorted(position for pack in packs for position in pack) == list(range(len(lengths)))
    assert all(sum(lengths[position] for position in pack) <= seq_length for pack in packs)


@settings(deadline=None)
@given(LENGTHS, SEQ_LENGTH, LOOK_AHEAD)
def test_packs_are_the_best_fits_within_the_look_ahead(lengths, seq_length, look_ahead):
    """Each pack is the one that its definition, written down plainly, asks for."""
    left = dict(enumerate(lengths))
    for pack in packs_once(lengths, seq_length=seq_length, look_ahead=look_ahead):
        first = min(left)
        expected, room = [first], seq_length - left.pop(first)
        while fitting := [p for p in left if p < first + look_ahead and left[p] <= room]:
            longest = max(fitting, key=lambda position: (left[position], -position))
            room -= left.pop(longest)
            expected.append(longest)
        assert pack == tuple(sorted(expected))
    assert not left


@settings(deadline=None)
@given(LENGTHS, SEQ_LENGTH, LOOK_AHEAD)
def test_no_more_is_read_or_held_than_the_look_ahead(lengths, seq_length, look_ahead):
    planner = PackPlanner(seq_length=seq_length, look_ahead=look_ahead)
    for read, length in enumerate(lengths, start=1):
        planner.add(length)
        pack = planner.next_pack()
        assert pack is None or pack[0] == read - look_ahead  # as soon as that is enough to say
        assert planner.next_pack() is None
        assert planner.state.read == read
        held = [position for position, _ in planner.state.held]
        assert all(position > read - look_ahead for position in held)


@settings(deadline=None)
@given(LENGTHS, SEQ_LENGTH, LOOK_AHEAD, st.data())
def test_a_planner_goes_on_from_any_state(lengths, seq_length, look_ahead, data):
    stop = data.draw(st.integers(0, len(lengths)))
    sizes = {"seq_length": seq_length, "look_ahead": look_ahead}
    planner = PackPlanner(**sizes)
    packs = feed(planner, lengths[:stop])
    state = PackingState(read=planner.state.read, held=tuple(planner.state.held))
    packs += feed(PackPlanner(**sizes, state=state), lengths[stop:], ended=True)
    assert packs == list(packs_once(lengths, **sizes))


@settings(deadline=None)
@given(LENGTHS, LOOK_AHEAD, LOOK_AHEAD)
def test_another_look_ahead_goes_on_without_losing_a_sample(lengths, before, after):
    planner = PackPlanner(seq_length=20, look_ahead=before)
    packs = feed(planner, lengths)
    resumed = PackPlanner(seq_length=20, look_ahead=after, state=planner.state)
    packs += feed(resumed, lengths, ended=True)
    found = sorted(position for pack in packs for position in pack)
    assert found == list(range(2 * len(lengths)))


def feed(planner: PackPlanner, lengths: list[int], *, ended: bool = False) -> list[Pack]:
    packs = []
    for length in lengths:
        planner.add(length)
        while (pack := planner.next_pack()) is not None:
            packs.append(pack)
    while ended and (pack := planner.next_pack(ended=True)) is not None:
        packs.append(pack)
    return packs


def test_among_equals_the_one_that_waited_longest_is_taken():
    assert list(packs_once([6, 5, 4, 4, 4], seq_length=10, look_ahead=5)) == [(0, 2), (1, 3), (4,)]


def test_a_look_ahead_of_one_is_padding():
    assert list(packs_once([1, 1, 1], seq_length=10, look_ahead=1)) == [(0,), (1,), (2,)]


def test_lengths_and_sizes_that_cannot_be():
    planner = PackPlanner(seq_length=10, look_ahead=2)
    planner.add(10)
    with pytest.raises(ValueError, match=r"position 1 has 11 tokens: expected 0 to 10"):
        planner.add(11)
    with pytest.raises(ValueError, match="position 1 has -1 tokens"):
        planner.add(-1)
    with pytest.raises(ValueError, match="position 0 has 10 tokens: expected 0 to 9"):
        PackPlanner(seq_length=9, look_ahead=2, state=planner.state)
