"""Packs as the loader gives them: what a row holds, on which rank, and after a resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_loader import local_loader
from micro.packing import plan

from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader, collate
from loongplug.data.microbatch import Microbatch
from loongplug.data.order import SampleOrder
from loongplug.data.processor import Processor
from loongplug.data.text_stream import START, PackedTexts, ResumePoint
from loongplug.data.workers import IN_PROCESS, WorkerSettings

pytestmark = pytest.mark.quick

SEQ_LENGTH, LOOK_AHEAD, ROWS = 64, 6, 12


@pytest.fixture
def dataset(
    processor: Processor, write_rows: Callable[..., Path], write_image: Callable[..., str], row: Any
) -> ChatDataset:
    """Rows of 11 to 40 tokens, with none, one or two images."""
    images = tuple(
        write_image(f"{side}.png", height=32, width=side, seed=side) for side in (32, 64)
    )
    rows = [
        row("Read", f"{i} " * (1 + 3 * i % 7), images=images[: i % 3 if i < 9 else 0])
        for i in range(ROWS)
    ]
    return ChatDataset(
        write_rows(*rows), processor=processor, seq_length=SEQ_LENGTH, training_phase="sft"
    )


def loader(dataset: ChatDataset, **options: Any) -> MicrobatchLoader:
    defaults = {
        "micro_batch_size": 1,
        "dp_rank": 0,
        "dp_size": 1,
        "seed": 5,
        "with_images": True,
        "look_ahead": LOOK_AHEAD,
    }
    return local_loader(dataset, **defaults | options)


def test_a_row_is_its_samples_one_behind_the_other(dataset: ChatDataset) -> None:
    samples = [dataset[i] for i in (2, 0, 1)]
    (pack,) = collate(samples, pad_token_id=7, seq_length=80, packed=True)
    lengths = [len(sample.input_ids) for sample in samples]
    assert len(set(lengths)) == 3
    assert pack.segments == tuple(lengths)
    assert pack.tokens == sum(lengths) < pack.capacity == 80
    assert pack.input_ids.shape == pack.labels.shape == pack.loss_mask.shape == (1, 80)
    rows = [
        (pack.input_ids[0], "input_ids", 7),
        (pack.labels[0], "labels", 7),
        (pack.loss_mask[0], "loss_mask", 0),
        *((pack.position_ids[axis, 0], "position_ids", 0) for axis in range(3)),
    ]
    for number, (found, name, padding) in enumerate(rows):
        start = 0
        for sample, length in zip(samples, lengths, strict=True):
            expected = getattr(sample, name)
            expected = expected[number - 3] if name == "position_ids" else expected
            assert found[start : start + length].tolist() == expected.tolist()
            start += length
        assert (found[start:] == padding).all()


def test_a_pack_s_images_are_in_the_order_of_its_samples(dataset: ChatDataset) -> None:
    grids = {
        tuple(sample.input_ids): sample.grids for sample in map(dataset.__getitem__, range(ROWS))
    }
    packs = loader(dataset)
    for pack in (next(packs) for _ in range(6)):
        expected = [list(grid) for ids in contents(pack) for grid in grids[tuple(ids)]]
        assert pack.vision is not None
        assert pack.vision.grid_thw.tolist() == expected


def test_the_last_token_of_a_sample_teaches_nothing(dataset: ChatDataset) -> None:
    """What follows it is another sample's."""
    pretrain = ChatDataset(
        dataset._rows.path,
        processor=dataset.processor,
        seq_length=SEQ_LENGTH,
        training_phase="pretrain",
    )
    for _, pack in zip(range(6), loader(pretrain), strict=False):
        assert pack.segments is not None
        ends = torch.tensor(pack.segments).cumsum(0) - 1
        assert len(ends) > 1
        assert (pack.loss_mask[0, ends] == 0).all()
        assert (pack.loss_mask[0, ends - 1] == 1).all()  # its neighbour learns to predict it
        starts = ends[:-1] + 1
        assert (pack.position_ids[:, 0, starts] == 0).all()


def test_a_full_row_has_no_padding(dataset: ChatDataset) -> None:
    samples = [dataset[i] for i in range(2)]
    full = sum(len(sample.input_ids) for sample in samples)
    (pack,) = collate(samples, pad_token_id=0, seq_length=full, packed=True)
    assert pack.tokens == pack.capacity == full


def test_a_stream_of_packs_goes_on_from_any_place(dataset: ChatDataset) -> None:
    def packs(place: ResumePoint) -> PackedTexts:
        return PackedTexts(
            dataset,
            look_ahead=LOOK_AHEAD,
            dp_rank=0,
            dp_size=1,
            seed=None,
            consumed_packs=place.packs,
            restart_after=None,
            resume=place,
            workers=IN_PROCESS,
        )

    def wheres(packs: PackedTexts, number: int) -> list[list[str]]:
        return [[sample.where for sample in next(packs)] for _ in range(number)]

    whole = wheres(packs(START), 12)
    stream, given = packs(START), []
    for number, expected in enumerate(whole):
        (pack,) = wheres(stream, 1)
        assert pack == expected
        place = stream.before
        assert place.packs == number
        # Each sample that was read is in one pack, or held back.
        held = [dataset[position % ROWS].where for position, _ in place.state.held]
        read = [dataset[position % ROWS].where for position in range(place.state.read)]
        assert sorted(given + held) == sorted(read)
        assert wheres(packs(place), 12 - number) == whole[number:]
        given += pack


def contents(pack: Microbatch) -> list[list[int]]:
    assert pack.segments is not None
    return [ids.tolist() for ids in pack.input_ids[0, : pack.tokens].split(pack.segments)]


def expected_packs(dataset: ChatDataset) -> list[list[list[int]]]:
    """Three epochs of the loader's order, packed by the planner."""
    indices = SampleOrder(ROWS, seed=5).indices(range(3 * ROWS))
    ids = [dataset[index].input_ids.tolist() for index in indices]
    packs = plan(map(len, ids), seq_length=SEQ_LENGTH, look_ahead=LOOK_AHEAD)
    return [[ids[position] for position in pack] for pack in packs]


def test_ranks_share_the_planned_packs_in_order(dataset: ChatDataset) -> None:
    expected = expected_packs(dataset)[:9]
    assert max(map(len, expected)) > 2
    ranks = [loader(dataset, dp_rank=rank, dp_size=3) for rank in range(3)]
    assert [contents(next(rank)) for _ in range(3) for rank in ranks] == expected
    assert all(rank.source.consumed_samples == 9 for rank in ranks)
    alone = loader(dataset)
    assert [contents(next(alone)) for _ in range(9)] == expected


def test_a_resumed_run_goes_on_with_the_next_pack(dataset: ChatDataset) -> None:
    expected = expected_packs(dataset)
    for consumed in (1, 4, 6):
        resumed = loader(dataset, consumed_samples=consumed, dp_rank=1, dp_size=2)
        assert contents(next(resumed)) == expected[consumed + 1]
        assert contents(next(resumed)) == expected[consumed + 3]


@pytest.mark.parametrize("processes", [0, 2])
def test_a_noted_place_is_gone_on_from_without_reading_what_is_before(
    dataset: ChatDataset, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_packs(dataset)
    workers = WorkerSettings(processes=processes)
    whole = loader(dataset, dp_rank=1, dp_size=2, workers=workers)
    for _ in range(3):
        next(whole)
    place = whole.source.resume_point()
    assert [contents(next(whole)) for _ in range(2)] == [expected[7], expected[9]]
    whole.source.close()
    assert place is not None
    assert place.packs == whole.source.consumed_samples - 4 == 6
    assert ResumePoint.of_plain(json.loads(json.dumps(place.plain()))) == place
    reads: list[int] = []
    text_parts = ChatDataset.text_parts
    monkeypatch.setattr(
        ChatDataset, "text_parts", lambda self, i: reads.extend(i) or text_parts(self, i)
    )
    ranks = [
        loader(dataset, dp_rank=rank, dp_size=3, consumed_samples=6, resume=place)
        for rank in range(3)
    ]
    assert [contents(next(rank)) for rank in ranks] == expected[6:9]
    first = dataset_order(place.state.read)
    assert len(reads) <= 3 * 32
    assert reads[: len(place.state.held)] == [first[position] for position, _ in place.state.held]


def dataset_order(count: int) -> list[int]:
    return SampleOrder(ROWS, seed=5).indices(range(count))


def test_evaluation_sees_the_same_packs_each_time(dataset: ChatDataset) -> None:
    evaluation = loader(dataset, seed=None, restart_after=4)
    seen = [contents(next(evaluation)) for _ in range(8)]
    assert seen[:4] == seen[4:]
    assert seen[0] != seen[1]


def test_ranks_without_images_have_the_same_packs(dataset: ChatDataset) -> None:
    with_images, without = loader(dataset), loader(dataset, with_images=False)
    for _ in range(6):
        one, other = next(with_images), next(without)
        assert other.vision is None
        assert one.segments == other.segments
        assert torch.equal(one.input_ids, other.input_ids)
