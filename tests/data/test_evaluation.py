"""What evaluations go through: any rows, in any layout, each once; the last step may be short."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_loader import local_loader
from surveyed import indexed

from loongplug.data.dataset import ChatDataset
from loongplug.data.sample_order import Evaluation, Packing

pytestmark = pytest.mark.quick

SEQ_LENGTH = 20


def evaluation_of(lengths: Sequence[int], *, look_ahead: int | None = None, **options: Any) -> Any:
    packing = None if look_ahead is None else Packing(seq_length=SEQ_LENGTH, look_ahead=look_ahead)
    defaults = {"batch": 4, "most_steps": None, "packing": packing, "lengths": iter(lengths)}
    return Evaluation.plan(len(lengths), **defaults | options)


def microbatches(
    plan: Evaluation, *, dp: int, micro: int, evaluations: int = 1
) -> list[tuple[int, ...]]:
    """Of so many evaluations, the rows of all ranks."""
    count = evaluations * plan.steps * plan.batch // (dp * micro)
    sizes = {"micro_batch_size": micro, "dp_size": dp}
    ranks = [plan.slots(dp_ranks=(rank,), **sizes) for rank in range(dp)]
    return [next(rank).rows for _ in range(count) for rank in ranks]


LENGTHS = st.lists(st.integers(0, SEQ_LENGTH), min_size=1, max_size=40)


@settings(deadline=None)
@given(
    LENGTHS,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5) | st.none(),
)
def test_each_row_comes_once_and_blank_ones_fill_the_last_step(lengths, dp, micro, rounds, most):
    batch = dp * micro * rounds
    plan = evaluation_of(lengths, batch=batch, most_steps=most)
    taken = len(lengths) if most is None else min(len(lengths), most * batch)
    assert plan.rows == taken
    assert plan.steps == -(-taken // batch)
    found = microbatches(plan, dp=dp, micro=micro, evaluations=2)
    assert len(found) * micro - 2 * taken < 2 * batch
    half = len(found) // 2
    for once in (found[:half], found[half:]):
        assert [row for rows in once for row in rows] == list(range(taken))
        blank = [micro - len(rows) for rows in once]
        assert blank == sorted(blank)  # behind all others


@settings(deadline=None)
@given(
    LENGTHS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 5) | st.none()
)
def test_packs_hold_each_row_once(lengths, dp, rounds, ahead, most):
    options = {"batch": dp * rounds, "look_ahead": ahead, "most_steps": most}
    plan = evaluation_of(lengths, **options)
    found = microbatches(plan, dp=dp, micro=1)
    packs = [pack for pack in found if pack]
    assert found[: len(packs)] == packs  # what is blank is behind
    assert len(found) - len(packs) < plan.batch
    assert all(sum(lengths[row] for row in pack) <= SEQ_LENGTH for pack in packs)
    seen = [row for pack in packs for row in pack]
    assert len(seen) == len({*seen}) == plan.rows
    every = evaluation_of(lengths, **options | {"most_steps": None})
    assert every.rows == len(lengths)
    assert every.packs[: len(plan.packs)] == plan.packs


def test_no_more_rows_are_measured_than_an_evaluation_has_places_for():
    lengths = iter([SEQ_LENGTH] * 1000)
    packing = Packing(seq_length=SEQ_LENGTH, look_ahead=8)
    plan = Evaluation.plan(1000, batch=4, most_steps=2, packing=packing, lengths=lengths)
    assert plan.rows == 8
    assert len(list(lengths)) > 960


def test_a_run_says_how_many_rows_and_steps_there_are():
    lengths = [7] * 9
    assert str(evaluation_of(lengths)) == "9 of 9 rows, each once, in 3 steps of 4"
    packed = evaluation_of(lengths, look_ahead=8, most_steps=1)
    assert str(packed) == "8 of 9 rows in 4 packs, each once, in 1 steps of 4"


def test_blank_places_are_blank_samples_with_an_index_and_without(processor, write_rows, row):
    """And a pack that is too long by now names a row."""
    path = write_rows(*(row("Read", "1" * count) for count in (9, 1, 9)))
    dataset = ChatDataset(path, processor=processor, seq_length=50, training_phase="sft")
    packed = evaluation_of([10] * 3, look_ahead=8)
    for data in (dataset, indexed(dataset)):
        each = local_loader(data, micro_batch_size=2, evaluation=evaluation_of([20] * 3))
        found = [next(each) for _ in range(2)]
        assert [microbatch.lengths for microbatch in found] == [
            (len(dataset[0]), len(dataset[1])),
            (len(dataset[2]), 0),
        ]
    dataset.seq_length = len(dataset[0])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the sample's pack is longer"):
        next(local_loader(dataset, micro_batch_size=1, look_ahead=8, evaluation=packed))
