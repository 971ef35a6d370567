"""The order of samples: epochs, seeds, and which rank takes which."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongplug.data.sample_order import SampleOrder, epoch_permutation, padded_slots

pytestmark = pytest.mark.quick


@given(
    num_samples=st.integers(1, 40),
    seed=st.none() | st.integers(0, 2**32 - 1),
    dp_size=st.integers(1, 4),
    micro_batch_size=st.integers(1, 4),
    rounds=st.integers(1, 4),
    consumed=st.integers(0, 100),
)
def test_all_ranks_together_take_the_next_piece_of_the_stream(
    num_samples, seed, dp_size, micro_batch_size, rounds, consumed
):
    order = SampleOrder(num_samples, seed=seed)
    sizes = {"micro_batch_size": micro_batch_size, "dp_size": dp_size, "consumed": consumed}
    slots = islice(padded_slots(order, dp_ranks=range(dp_size), **sizes), dp_size * rounds)
    size = dp_size * micro_batch_size * rounds
    expected = order.indices(range(consumed, consumed + size))
    assert [row for slot in slots for row in slot.rows] == expected


@given(num_samples=st.integers(1, 60), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 5))
def test_an_epoch_has_every_sample_once(num_samples, seed, epoch):
    order = SampleOrder(num_samples, seed=seed)
    start = epoch * num_samples
    assert sorted(order.indices(range(start, start + num_samples))) == list(range(num_samples))


def test_epochs_and_seeds_differ_and_the_numbers_stay():
    first = epoch_permutation(50, seed=3, epoch=0).tolist()
    assert first != epoch_permutation(50, seed=3, epoch=1).tolist()
    assert first != epoch_permutation(50, seed=4, epoch=0).tolist()
    assert first != sorted(first)
    # Runs resume by these numbers: they must be the same in every version.
    assert epoch_permutation(8, seed=1, epoch=2).tolist() == [2, 4, 1, 5, 6, 3, 0, 7]


def test_order_does_not_depend_on_what_was_asked_before():
    order = SampleOrder(7, seed=5)
    forward = order.indices(range(30))
    assert [order.indices([position])[0] for position in reversed(range(30))] == forward[::-1]


def test_without_a_seed_in_file_order():
    assert SampleOrder(3, seed=None).indices(range(7)) == [0, 1, 2, 0, 1, 2, 0]
