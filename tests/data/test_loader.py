"""Datasets, collation and the loader: from rows on disk to microbatches."""

import base64
from pathlib import Path
from typing import Any

import pytest
from image_units import media_of, unit_of
from local_loader import local_loader, require_alike
from PIL import ImageFile

from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import Microbatch
from loongplug.data.processor import Processor
from loongplug.data.sample import BadSampleError
from loongplug.data.sample_order import Evaluation
from loongplug.data.workers import WorkerSettings

pytestmark = pytest.mark.quick


@pytest.fixture
def dataset(processor, write_rows, write_image, row) -> ChatDataset:
    """Ten rows, told apart by their answers; row 3k has no image, others one or two."""
    images = [
        write_image("a.png", height=32, width=32, seed=1),
        write_image("b.png", height=64, width=32, seed=2),
    ]
    rows = [row("Read the digits.", str(i), images=tuple(images[: i % 3])) for i in range(10)]
    return ChatDataset(write_rows(*rows), processor=processor, seq_length=32, training_phase="sft")


def loader(dataset: ChatDataset, **options: Any) -> MicrobatchLoader:
    return local_loader(dataset, **{"micro_batch_size": 2} | options)


def answers(microbatch: Microbatch, dataset: ChatDataset) -> list[str]:
    """What the loss counts, row by row."""
    return [
        dataset.processor.tokenizer.decode(labels[mask.bool()])
        for labels, mask in zip(microbatch.labels, microbatch.loss_mask, strict=True)
    ]


def test_sample_labels_are_the_next_tokens(dataset):
    sample = dataset[4]  # one image of one token
    assert dataset[4] is sample  # kept
    length = len(sample.input_ids)
    assert sample.labels[:-1].tolist() == sample.input_ids[1:].tolist()
    assert sample.position_ids.shape == (3, length)
    answered = sample.loss_mask.nonzero()[0].tolist()
    assert answered == [length - 4, length - 3]  # then the end token, then a line's end
    tokens = dataset.processor.tokenizer.convert_ids_to_tokens(sample.labels[answered])
    assert tokens == ["4", "<|im_end|>"]
    assert sample.where.endswith("rows.jsonl:5")


def test_an_image_in_the_row_is_as_its_file(processor, write_rows, write_image, row, tmp_path):
    """In background processes too, and a damaged one is a bad row that says where it is."""
    name = write_image("a.png", height=64, width=32)
    content = (tmp_path / name).read_bytes()
    urls = ["data:image/png;base64," + base64.b64encode(part).decode() for part in (content, b"no")]
    ask = "Read the digits."
    rows = write_rows(*(row(ask, "1", images=(image,)) for image in (name, *urls)))
    dataset = ChatDataset(rows, processor=processor, seq_length=32, training_phase="sft")
    made = loader(dataset, micro_batch_size=1, workers=WorkerSettings(processes=1))
    file, inline = (next(made) for _ in range(2))
    made.source.close()
    require_alike(inline, file)
    with pytest.raises(
        BadSampleError, match=r"rows.jsonl:3: of 2 bytes in the row is not an image"
    ):
        dataset[2]


def test_a_microbatch_of_text_is_a_zero_length_unit(dataset):
    vision = media_of(next(loader(dataset, micro_batch_size=1)))
    assert vision.rows.shape == (0, 1536)
    assert vision.grids.shape == (0, 3)


def test_ranks_without_images_build_the_same_text_and_decode_nothing(dataset, monkeypatch):
    with_images = loader(dataset, seed=7)
    expected = [next(with_images) for _ in range(8)]

    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded an image")

    fresh = ChatDataset(
        dataset.rows.path, processor=dataset.processor, seq_length=32, training_phase="sft"
    )
    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    without = loader(fresh, seed=7, with_images=False)
    for one in expected:
        other = next(without)
        assert unit_of(other).media is None
        require_alike(other, one, media=False)
    with pytest.raises(BadSampleError, match="decoded"):  # the guard does guard
        next(loader(fresh, micro_batch_size=10))


def test_ranks_share_the_global_batch(dataset):
    alone = loader(dataset, seed=3, micro_batch_size=12)
    ranks = [loader(dataset, seed=3, dp_rank=rank, dp_size=3) for rank in range(3)]
    for _ in range(4):
        split = [
            answer for _ in range(2) for rank in ranks for answer in answers(next(rank), dataset)
        ]
        assert split == answers(next(alone), dataset)


def test_evaluation_goes_in_file_order_and_begins_again(dataset):
    every = loader(dataset, micro_batch_size=4)
    seen = [answer for _ in range(5) for answer in answers(next(every), dataset)]
    assert seen == [f"{i % 10}<|im_end|>" for i in range(20)]
    evaluation = Evaluation.plan(len(dataset), batch=4, most_steps=None)
    once = loader(dataset, micro_batch_size=4, evaluation=evaluation)
    for _ in range(2):
        microbatches = [next(once) for _ in range(3)]
        seen = [answer for each in microbatches for answer in answers(each, dataset)]
        assert seen == [f"{i}<|im_end|>" for i in range(10)] + ["", ""]
        assert microbatches[2].lengths[2:] == (0, 0)


def open_rows(rows: Path, processor: Processor, *, seq_length: int = 32) -> ChatDataset:
    return ChatDataset(rows, processor=processor, seq_length=seq_length, training_phase="sft")


def test_longest_sample_that_fits(processor, write_rows, row):
    rows = write_rows(row("Read", "1"))
    assert len(open_rows(rows, processor, seq_length=12)[0].input_ids) == 12
    with pytest.raises(ValueError, match="has 12 tokens, but --seq-length is 11"):
        open_rows(rows, processor, seq_length=11)[0]
