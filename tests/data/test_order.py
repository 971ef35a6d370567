import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongplug.data.sample_order import SampleOrder, epoch_permutation, microbatch_positions

pytestmark = pytest.mark.quick


def global_batch(
    order: SampleOrder, *, consumed: int, size: int, dp_size: int, micro_batch_size: int
) -> list[int]:
    """What all ranks see in one step, microbatch by microbatch."""
    per_round = dp_size * micro_batch_size
    return [
        index
        for start in range(consumed, consumed + size, per_round)
        for rank in range(dp_size)
        for index in order.indices(
            microbatch_positions(
                start, micro_batch_size=micro_batch_size, dp_rank=rank, dp_size=dp_size
            )
        )
    ]


@given(
    num_samples=st.integers(1, 40),
    seed=st.none() | st.integers(0, 2**32 - 1),
    dp_size=st.integers(1, 4),
    micro_batch_size=st.integers(1, 4),
    rounds=st.integers(1, 4),
    consumed=st.integers(0, 100),
)
def test_any_split_sees_the_same_global_batch(
    num_samples: int,
    seed: int | None,
    dp_size: int,
    micro_batch_size: int,
    rounds: int,
    consumed: int,
) -> None:
    size = dp_size * micro_batch_size * rounds
    split = global_batch(
        SampleOrder(num_samples, seed=seed),
        consumed=consumed,
        size=size,
        dp_size=dp_size,
        micro_batch_size=micro_batch_size,
    )
    alone = global_batch(
        SampleOrder(num_samples, seed=seed),
        consumed=consumed,
        size=size,
        dp_size=1,
        micro_batch_size=size,
    )
    assert split == alone


@given(num_samples=st.integers(1, 60), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 5))
def test_an_epoch_has_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = SampleOrder(num_samples, seed=seed)
    start = epoch * num_samples
    assert sorted(order.indices(range(start, start + num_samples))) == list(range(num_samples))


def test_epochs_and_seeds_differ_and_the_numbers_stay() -> None:
    first = epoch_permutation(50, seed=3, epoch=0).tolist()
    assert first != epoch_permutation(50, seed=3, epoch=1).tolist()
    assert first != epoch_permutation(50, seed=4, epoch=0).tolist()
    assert first != sorted(first)
    # Runs resume by these numbers: they must be the same in every version.
    assert epoch_permutation(8, seed=1, epoch=2).tolist() == [2, 4, 1, 5, 6, 3, 0, 7]


def test_order_does_not_depend_on_what_was_asked_before() -> None:
    order = SampleOrder(7, seed=5)
    forward = order.indices(range(30))
    assert [order.indices([position])[0] for position in reversed(range(30))] == forward[::-1]


def test_without_a_seed_in_file_order() -> None:
    assert SampleOrder(3, seed=None).indices(range(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_nothing_to_order_is_refused() -> None:
    with pytest.raises(ValueError, match="is 0: expected at least 1"):
        SampleOrder(0, seed=None)
