"""What evaluations go through: any rows, in any layout, each once; the last step may be short."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongplug.data.dataset import Sample
from loongplug.data.evaluation import Evaluation, evaluated_texts
from loongplug.data.workers import IN_PROCESS

pytestmark = pytest.mark.quick

SEQ_LENGTH = 20


class Rows:
    """A data set whose samples have nothing but lengths and places; 0 is of one that is bad."""

    seq_length = SEQ_LENGTH

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def text_parts(self, indices: Sequence[int]) -> list[Any]:
        self.read += indices
        return [Row(index, self.lengths[index]) for index in indices]


class Row(SimpleNamespace):
    def __init__(self, index: int, length: int) -> None:
        super().__init__(where=f"rows.jsonl:{index + 1}", index=index, length=length)

    def __len__(self) -> int:
        return self.length


def evaluation_of(rows: Any, **options: Any) -> Evaluation:
    defaults = {"batch": 4, "most_steps": None, "look_ahead": None, "lengths": None}
    return Evaluation.plan(rows, **defaults | options)


def microbatches(
    rows: Any, plan: Evaluation, *, dp: int, micro: int, evaluations: int = 1
) -> list[list[Any]]:
    """Of so many evaluations, those of all ranks."""
    count = evaluations * plan.steps * plan.batch // (dp * micro)
    sizes = {"micro_batch_size": micro, "dp_size": dp, "workers": IN_PROCESS}
    ranks = [evaluated_texts(rows, plan, dp_rank=rank, **sizes) for rank in range(dp)]
    return [next(rank) for _ in range(count) for rank in ranks]


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
    rows, batch = Rows(lengths), dp * micro * rounds
    plan = evaluation_of(rows, batch=batch, most_steps=most)
    taken = len(rows) if most is None else min(len(rows), most * batch)
    assert plan.rows == taken
    assert plan.steps == -(-taken // batch)
    found = microbatches(rows, plan, dp=dp, micro=micro, evaluations=2)
    assert {len(each) for each in found} == {micro}
    samples = [sample for each in found for sample in each]
    for once in (samples[: len(samples) // 2], samples[len(samples) // 2 :]):
        assert [sample.index for sample in once[:taken]] == list(range(taken))
        blank = once[taken:]
        assert len(blank) < batch
        assert all(isinstance(each, Sample) and len(each) == 0 for each in blank)


@settings(deadline=None)
@given(
    LENGTHS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 5) | st.none()
)
def test_packs_hold_each_row_once_with_an_index_and_without(lengths, dp, rounds, ahead, most):
    rows, options = Rows(lengths), {"batch": dp * rounds, "look_ahead": ahead, "most_steps": most}
    plan = evaluation_of(rows, **options)
    index = np.array(lengths, dtype=np.int32)
    assert plan == evaluation_of(rows, lengths=index, **options)
    found = microbatches(rows, plan, dp=dp, micro=1)
    packs = [pack for pack in found if isinstance(pack[0], Row)]
    assert found[: len(packs)] == packs  # what is blank is behind
    assert len(found) - len(packs) < plan.batch
    assert all(sum(map(len, pack)) <= SEQ_LENGTH for pack in packs)
    seen = [sample.index for pack in packs for sample in pack]
    assert len(seen) == len({*seen}) == plan.rows
    every = evaluation_of(rows, **options | {"most_steps": None})
    assert every.rows == len(rows)
    assert every.packs[: len(plan.packs)] == plan.packs


def test_no_more_rows_are_measured_than_an_evaluation_has_places_for():
    rows = Rows([SEQ_LENGTH] * 1000)
    plan = evaluation_of(rows, look_ahead=8, most_steps=2)
    assert plan.rows == 8
    assert len(rows.read) < 40


def test_a_run_says_how_many_rows_and_steps_there_are():
    rows = Rows([7] * 9)
    assert str(evaluation_of(rows)) == "9 of 9 rows, each once, in 3 steps of 4"
    packed = evaluation_of(rows, look_ahead=8, most_steps=1)
    assert str(packed) == "8 of 9 rows in 4 packs, each once, in 1 steps of 4"


def test_a_pack_that_is_too_long_by_now_names_a_row():
    rows = Rows([10] * 4)
    plan = evaluation_of(rows, look_ahead=8)
    rows.lengths[3] = 11
    with pytest.raises(ValueError, match=re.escape("rows.jsonl:4: the sample's pack is longer")):
        microbatches(rows, plan, dp=1, micro=1)
