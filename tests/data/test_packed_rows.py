"""Packs as the loader gives them: what a row holds, on which rank, and after a resume."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from image_units import media_of
from local_loader import local_loader, require_alike
from numpy.typing import NDArray
from surveyed import grids_of, indexed

from loongplug.context.row_parts import RowParts
from loongplug.context.token_split import zigzag
from loongplug.data.bad_samples import BadSamples
from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader, collate
from loongplug.data.microbatch import Microbatch
from loongplug.data.packing import Pack, packs_once
from loongplug.data.row_files import JsonlIndex
from loongplug.data.sample import BadSampleError
from loongplug.data.sample_order import (
    Packing,
    PackStream,
    ResumePoint,
    SampleOrder,
    packs_of_epochs,
)
from loongplug.data.workers import WorkerSettings

pytestmark = pytest.mark.quick

SEQ_LENGTH, LOOK_AHEAD, ROWS = 64, 6, 12
PACKING = Packing(seq_length=SEQ_LENGTH, look_ahead=LOOK_AHEAD)


@pytest.fixture
def dataset(processor, write_rows, write_image, row) -> ChatDataset:
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
    defaults = {"micro_batch_size": 1, "seed": 5, "look_ahead": LOOK_AHEAD}
    return local_loader(dataset, **defaults | options)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_have_their_samples_and_padding_behind_them(dataset, packed):
    samples = [dataset[i] for i in (2, 0, 1)]
    rows = [samples] if packed else [[sample] for sample in samples]
    (made,) = collate(samples, pad_token_id=7, seq_length=80, packed=packed)
    lengths = tuple(map(len, samples))
    assert len(set(lengths)) == 3
    assert (made.segments, made.lengths) == (lengths if packed else None, lengths)
    assert made.tokens == sum(lengths) < made.capacity == 80 * len(rows)
    for name, padding, kind in (
        ("input_ids", 7, torch.int64),
        ("labels", 7, torch.int64),
        ("loss_mask", 0, torch.float32),
        ("position_ids", 0, torch.int64),
    ):
        found = getattr(made, name)
        assert found.dtype == kind
        for number, row in enumerate(rows):
            expected = np.concatenate([getattr(sample, name) for sample in row], axis=-1)
            text, rest = np.split(found[..., number, :].numpy(), [expected.shape[-1]], axis=-1)
            np.testing.assert_array_equal(text, expected)
            assert (rest == padding).all()


@pytest.mark.parametrize(
    ("packed", "balance"), [(True, "zigzag"), (False, "zigzag"), (True, "lpt")]
)
def test_parts_of_rows_have_each_token_once_and_know_the_whole_row(dataset, packed, balance):
    samples = [dataset[i] for i in (2, 0, 1)]
    ids = {"image_encoder": dataset.processor.places("image")}
    how: Any = {"pad_token_id": 7, "seq_length": 84, "packed": packed, "token_ids": ids}
    (whole,) = collate(samples, **how)
    ranks = [RowParts(cp=3, rank=rank, balance=balance) for rank in range(3)]
    parts = [collate(samples, parts=each, **how)[0] for each in ranks]
    split = parts[0].own.split
    for name in ("input_ids", "labels", "loss_mask", "position_ids"):
        held = torch.cat([getattr(part, name) for part in parts], dim=-1)
        assert torch.equal(held, getattr(whole, name)[..., split.order])
    assert (split.order.tolist() == zigzag(84, cp=3).order.tolist()) == (balance == "zigzag")
    for part in parts:
        assert part.own.split.order.tolist() == split.order.tolist()
        assert (part.segments, part.lengths, part.tokens) == (
            whole.segments,
            whole.lengths,
            whole.tokens,
        )
        assert part.capacity == whole.capacity == (1 if packed else 3) * 84
        assert part.units["image_encoder"].tokens == whole.units["image_encoder"].tokens > 0


def test_a_pack_s_images_are_in_the_order_of_its_samples(dataset):
    grids = {
        tuple(sample.input_ids): grids_of(sample)
        for sample in map(dataset.__getitem__, range(ROWS))
    }
    packs = loader(dataset)
    for pack in (next(packs) for _ in range(6)):
        expected = [list(grid) for ids in contents(pack) for grid in grids[tuple(ids)]]
        assert media_of(pack).grids.tolist() == expected


def test_the_last_token_of_a_sample_teaches_nothing(dataset):
    """What follows it is another sample's."""
    pretrain = ChatDataset(
        dataset.rows.path,
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


def contents(pack: Microbatch) -> list[list[int]]:
    assert pack.segments is not None
    return [ids.tolist() for ids in pack.input_ids[0, : pack.tokens].split(pack.segments)]


def expected_packs(dataset: ChatDataset) -> list[list[list[int]]]:
    """Three epochs of the loader's order, packed by the planner."""
    indices = SampleOrder(ROWS, seed=5).indices(range(3 * ROWS))
    ids = [dataset[index].input_ids.tolist() for index in indices]
    packs = packs_once(map(len, ids), seq_length=SEQ_LENGTH, look_ahead=LOOK_AHEAD)
    return [[ids[position] for position in pack] for pack in packs]


def test_ranks_share_the_planned_packs_in_order(dataset):
    expected = expected_packs(dataset)[:9]
    assert max(map(len, expected)) > 2
    ranks = [loader(dataset, dp_rank=rank, dp_size=3) for rank in range(3)]
    assert [contents(next(rank)) for _ in range(3) for rank in ranks] == expected
    assert all(rank.source.consumed_samples == 9 for rank in ranks)
    alone = loader(dataset)
    assert [contents(next(alone)) for _ in range(9)] == expected


def test_what_is_before_a_noted_place_is_not_read(dataset, monkeypatch):
    whole = loader(dataset)
    for _ in range(6):
        next(whole)
    place = whole.source.resume_point()
    assert place is not None
    reads: list[int] = []
    text_parts = ChatDataset.text_parts
    monkeypatch.setattr(
        ChatDataset, "text_parts", lambda self, i: reads.extend(i) or text_parts(self, i)
    )
    next(loader(dataset, consumed_samples=6, resume=place))
    order = SampleOrder(ROWS, seed=5)
    held = [order.index(position) for position, _ in place.state.held]
    assert reads[: len(held)] == held
    assert reads[len(held)] == order.index(place.state.read)


def lengths_of(dataset: ChatDataset) -> NDArray[np.int32]:
    samples = dataset.text_parts(range(len(dataset)))
    return np.array([len(sample) for sample in samples], dtype=np.int32)


@pytest.mark.parametrize("processes", [0, 2])
def test_packs_planned_from_an_index_are_the_same_at_the_same_places(dataset, processes):
    known, workers = indexed(dataset), WorkerSettings(processes=processes)
    for rank in range(2):
        ranks = {"dp_rank": rank, "dp_size": 2, "workers": workers}
        planned, read = loader(known, **ranks), loader(dataset, **ranks)
        for _ in range(8):
            assert planned.source.resume_point() == read.source.resume_point()
            require_alike(next(planned), next(read))
        for each in (planned, read):
            each.source.close()


@pytest.mark.parametrize("goes_on", ["with", "without"])
@pytest.mark.parametrize("noted", ["with", "without"])
def test_a_run_goes_on_in_the_middle_of_an_epoch(dataset, noted, goes_on):
    """On other ranks, by a place that it noted with an index or without, and by none."""
    data = {"with": indexed(dataset), "without": dataset}
    expected = expected_packs(dataset)
    before = loader(data[noted], dp_size=2)
    for _ in range(2):
        next(before)
    noted_place = before.source.resume_point()
    assert noted_place is not None
    plain = json.loads(json.dumps(noted_place.plain()))
    for place in (ResumePoint.of_plain(plain), None):
        options = {"consumed_samples": 4, "dp_size": 3, "resume": place}
        ranks = [loader(data[goes_on], dp_rank=rank, **options) for rank in range(3)]
        assert [contents(next(rank)) for _ in range(2) for rank in ranks] == expected[4:10]


def test_a_sample_that_cannot_be_used_any_more_leaves_its_room_empty(dataset):
    """Its media still have their places there, but nothing is trained on."""
    known, path = indexed(dataset), dataset.rows.path
    gone = dataset[4].input_ids.tolist()
    before = [next(packs) for packs in [loader(known)] for _ in range(6)]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4].replace("assistant", "nobody's"), *lines[5:]]))
    known.rows = JsonlIndex(path)
    with pytest.raises(BadSampleError, match=r"rows\.jsonl:5: "):
        list(islice(loader(known), ROWS))
    packs, emptied = loader(known, bad_samples=BadSamples("skip")), 0
    for whole, pack in zip(before, packs, strict=False):
        assert (pack.lengths, pack.segments) == (whole.lengths, whole.segments)
        assert torch.equal(media_of(pack).grids, media_of(whole).grids)
        for mine, theirs, ids in zip(
            *(each.loss_mask[0, : pack.tokens].split(pack.segments) for each in (pack, whole)),
            contents(whole),
            strict=True,
        ):
            assert torch.equal(mine, torch.zeros_like(theirs) if ids == gone else theirs)
            emptied += ids == gone
    assert emptied > 0


def planned_packs(lengths: NDArray[np.int32]) -> Iterator[Pack]:
    order = SampleOrder(ROWS, seed=5)
    packs = PackStream(lambda position: int(lengths[order.index(position)]), packing=PACKING)
    while True:
        yield packs.next()


@pytest.mark.parametrize("epochs", [1, 3])
def test_packs_of_epochs_hold_all_their_samples_and_are_no_more(dataset, epochs):
    lengths = lengths_of(dataset)
    count = packs_of_epochs(lengths, seed=5, packing=PACKING, epochs=epochs)
    packs = list(islice(planned_packs(lengths), count))
    wanted = {*range(epochs * ROWS)}
    assert wanted <= {position for pack in packs for position in pack}
    assert not wanted <= {position for pack in packs[:-1] for position in pack}
