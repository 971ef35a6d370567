"""How long padded rows are, by the lengths of the samples alone."""

from types import SimpleNamespace
from typing import Any

import pytest
from image_units import ENCODER
from local_loader import local_source

from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader, RowLengths
from loongplug.data.sample import RowExtent
from loongplug.data.sample_order import StepSizes
from loongplug.training.rank_data import row_lengths_of

pytestmark = pytest.mark.quick


def texts(*lengths: int) -> list[list[Any]]:
    return [[RowExtent(lengths=(length,)) for length in lengths]]


@pytest.mark.parametrize(
    ("parts", "lengths", "expected"),
    [(1, (3, 17), 24), (1, (24,), 24), (3, (17,), 24), (4, (33,), 64), (1, (0, 0), 8)],
)
def test_a_row_has_room_for_the_longest_and_ranks_share_it(parts, lengths, expected):
    assert RowLengths(parts=parts).of(texts(*lengths), longest=100) == expected


def test_a_row_is_never_longer_than_the_run_s():
    assert RowLengths(parts=4).of(texts(41), longest=60) == 60


@pytest.fixture
def dataset(processor, write_rows, row) -> ChatDataset:
    rows = [row("Read. " * (1 + 5 * (number % 4)), str(number)) for number in range(8)]
    return ChatDataset(write_rows(*rows), processor=processor, seq_length=200, training_phase="sft")


def loader_of(dataset: ChatDataset, *, by_step: bool, only: range | None = None) -> Any:
    return MicrobatchLoader(
        local_source(dataset, sizes=StepSizes.constant(4), micro_batch_size=2, parts={0: only}),
        processor=dataset.processor,
        seq_length=dataset.seq_length,
        row_lengths=RowLengths(by_step=by_step),
        token_ids={ENCODER: dataset.processor.places("image", "video")},
    )


def shapes(loader: Any) -> list[tuple[int, ...]]:
    return [(each.split.length, *each.lengths) for each in (next(loader) for _ in range(4))]


def test_a_microbatch_s_rows_or_a_step_s_have_one_length(dataset):
    own, by_step = (shapes(loader_of(dataset, by_step=each)) for each in (False, True))
    assert [lengths for _, *lengths in own] == [lengths for _, *lengths in by_step]
    assert [length for length, *_ in own] == [-(-max(each) // 8) * 8 for _, *each in own]
    assert own[0][0] < own[1][0] < 200  # or nothing is told apart here
    for first in (0, 2):  # the microbatches of a step
        longest = max(length for length, *_ in own[first : first + 2])
        assert [length for length, *_ in by_step[first : first + 2]] == [longest] * 2


@pytest.mark.parametrize("by_step", [False, True])
def test_who_makes_some_samples_of_a_microbatch_makes_rows_as_long(dataset, by_step):
    """Encoders on ranks of their own, of each microbatch a piece."""
    whole = shapes(loader_of(dataset, by_step=by_step))
    first = shapes(loader_of(dataset, by_step=by_step, only=range(1)))
    assert [length for length, *_ in first] == [length for length, *_ in whole]
    assert [len(lengths) for _, *lengths in first] == [1] * 4


def arguments(**given: Any) -> Any:
    defaults = {
        "packing": False,
        "num_experts": None,
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**defaults | given)


GATHERS = {"num_experts": 4, "moe_token_dispatcher_type": "allgather"}
TP2 = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, RowLengths()),
        (TP2, RowLengths()),
        ({**TP2, "sequence_parallel": True}, RowLengths(parts=2)),
        ({"context_parallel_size": 3}, RowLengths(parts=6)),
        ({**TP2, "sequence_parallel": True, "context_parallel_size": 3}, RowLengths(parts=6)),
        ({"pipeline_model_parallel_size": 2}, RowLengths(by_step=True)),
        ({"packing": True}, None),
        (GATHERS, RowLengths()),
        ({**GATHERS, "expert_model_parallel_size": 2}, None),
        ({**GATHERS, **TP2, "expert_model_parallel_size": 2}, None),  # expert tp is tp
        (
            {**GATHERS, **TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            RowLengths(),
        ),
        ({"num_experts": 4, "expert_model_parallel_size": 2}, RowLengths()),
    ],
    ids=str,
)
def test_a_run_s_layout_decides(given, expected):
    assert row_lengths_of(arguments(**given)) == expected
