"""With an index, a run opens no header of a medium, and reads its own rows alone."""

from typing import Any

import numpy as np
import pytest
import torch
from audio_folders import noise, write_qwen2_audio, write_wav
from image_units import unit_of
from local_loader import local_loader, local_source
from surveyed import grids_of, indexed
from torch import Tensor

from loongplug.data import media_kinds, video
from loongplug.data.bad_samples import BadSamples
from loongplug.data.dataset import ChatDataset
from loongplug.data.media_files import ChangedFileError
from loongplug.data.planned_media import EncoderUnits, LoadedUnit
from loongplug.data.processor_folder import load_processor
from loongplug.data.row_files import JsonlIndex
from loongplug.data.sample import MAKE_AGAIN, Sample
from loongplug.data.workers import WorkerSettings

pytestmark = pytest.mark.quick

ROWS = 32


def part(kind: str, named: str | list[str]) -> dict[str, Any]:
    return {"type": kind, kind: named}


def asked(*parts: dict[str, Any], answer: str = "1") -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What?"}]
    said = {"role": "assistant", "content": answer}
    return {"messages": [{"role": "user", "content": content}, said]}


@pytest.fixture(params=["image", "frames", "film", "sound"])
def data(request, tmp_path, write_rows) -> Any:
    """Four rows with two media of one kind each."""
    sounds, kind = request.param == "sound", str(request.param)
    if sounds:
        processor = load_processor(write_qwen2_audio(tmp_path / "processor"))
        for number in range(2):
            write_wav(tmp_path / f"{number}.wav", noise(8_000 * (1 + number), seed=number))
        media = [part("audio", f"{number}.wav") for number in range(2)]
    else:
        processor = request.getfixturevalue("processor")
        make = request.getfixturevalue("write_image")
        names = [make(f"{n}.png", height=32, width=32 + n // 4 * 32, seed=n) for n in range(8)]
        media = [part("image", name) for name in names[::4]]
        if kind == "frames":
            media = [{**part("video", names[n : n + 4]), "fps": 2} for n in (0, 4)]
        if kind == "film":
            film = request.getfixturevalue("write_video")
            media = [part("video", film(f"{n}.mp4", 12, fps=8, height=32)) for n in range(2)]
    path = write_rows(*(asked(*media[::step], answer="1" * n) for n in (2, 5) for step in (1, -1)))
    return ChatDataset(
        path, processor=processor, seq_length=600, training_phase="sft", cache_bytes=0
    )


def made_of(dataset: ChatDataset, *, processes: int = 0) -> tuple[list[Sample], list[Tensor]]:
    """Samples, and the rows of their media."""
    kinds_of = ("audio",) if dataset.processor.images is None else ("image", "video")
    source = local_source(
        dataset,
        micro_batch_size=2,
        encoders={"encoder": EncoderUnits(kinds=kinds_of)},
        workers=WorkerSettings(processes=processes),
    )
    samples: list[Sample] = []
    rows = []
    try:
        for _ in range(2):
            for planned in source.next_step():
                samples += planned.samples
                assert planned.trained == sum(each.loss_mask.sum() for each in planned.samples) > 0
                (share,) = planned.units["encoder"].shares
                assert share.load is not None
                loaded: LoadedUnit = share.load()
                assert not loaded.bad
                rows.append(loaded.rows)
    finally:
        source.close()
    return samples, rows


@pytest.mark.parametrize("processes", [0, 1])
def test_no_header_is_opened_and_all_is_as_without_an_index(data, processes, monkeypatch):
    known = indexed(data)
    samples, rows = made_of(data)

    def opened(path: Any, **options: Any) -> Any:
        raise AssertionError(f"the header of {path} is opened")

    for module, name in (
        (media_kinds, "image_size"),
        (media_kinds, "audio_length"),
        (video, "image_size"),
        (video, "video_header"),
    ):
        monkeypatch.setattr(module, name, opened)
    found, found_rows = made_of(known, processes=processes)
    assert len(samples) == len(found) == 4
    for mine, theirs in zip(found, samples, strict=True):
        for name in ("input_ids", "labels", "loss_mask", "position_ids"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
        assert (mine.extent, mine.where) == (theirs.extent, theirs.where)
        assert grids_of(mine)
    for one, other in zip(found_rows, rows, strict=True):
        assert torch.equal(one, other)
        assert one.any()
    with pytest.raises(RuntimeError, match="is opened"):  # without an index it is
        made_of(data)


@pytest.fixture
def dataset(processor, write_rows, write_image) -> ChatDataset:
    """ROWS rows with none, one or two images."""
    images = [part("image", write_image(f"{n}.png", height=32, width=32 * n)) for n in (1, 2)]
    rows = [asked(*images[: n % 3], answer=f"{n}") for n in range(ROWS)]
    return ChatDataset(
        write_rows(*rows), processor=processor, seq_length=64, training_phase="sft", cache_bytes=0
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("processes", [0, 1])
def test_a_rank_of_eight_reads_an_eighth(dataset, packed, processes, tmp_path):
    """Of an epoch's rows each rank makes its own, all together each once."""
    known, noted = indexed(dataset), tmp_path / "read"
    text_parts = known.text_parts

    def read(indices: Any) -> Any:
        with noted.open("a") as file:  # background processes write it, too
            file.write("".join(f"{index}\n" for index in indices))
        return text_parts(indices)

    known.text_parts = read  # type: ignore[method-assign]
    options: dict[str, Any] = {"look_ahead": 4} if packed else {}
    counts = []
    for rank in range(8):
        noted.write_text("")
        batches = local_loader(
            known,
            micro_batch_size=1,
            dp_rank=rank,
            dp_size=8,
            seed=3,
            workers=WorkerSettings(processes=processes, depth=3),
            **options,
        )
        own = sum(len(next(batches).lengths) for _ in range(4))
        batches.source.close()
        counts.append((len(noted.read_text().split()), own))
    ahead = 3 * processes * (4 if packed else 1)  # of its own; a pack has four samples at most
    assert all(own <= read <= own + ahead for read, own in counts), counts
    if not packed:
        assert [own for _, own in counts] == [4] * 8  # 32 rows in all


def test_a_rank_without_text_reads_no_row(dataset, monkeypatch):
    """As one that only encodes: it knows the places of media from the index alone."""
    known = indexed(dataset)
    whole = local_source(dataset, micro_batch_size=2, dp_size=2, seed=3)
    silent = local_source(known, micro_batch_size=2, dp_size=2, seed=3, text=False)
    expected = [each for _ in range(3) for each in whole.next_step()]
    texts = [each.samples for each in expected]

    def tokenized(*_: Any, **__: Any) -> Any:
        raise AssertionError("a text is made")

    monkeypatch.setattr("loongplug.data.dataset.tokenize_conversation", tokenized)
    for planned, text in zip((x for _ in range(3) for x in silent.next_step()), texts, strict=True):
        for mine, theirs in zip(planned.samples, text, strict=True):
            assert mine.extent == theirs.extent
            places = np.isin(theirs.input_ids, known.processor.places("image", "video"))
            assert np.array_equal(np.where(places, theirs.input_ids, 0), mine.input_ids)
        (share,) = unit_of(planned).shares
        assert share.load().rows.any() == bool(unit_of(planned).media.media)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_grid_that_does_not_fit_its_medium_is_a_bad_sample(dataset, processes):
    """The sixth row has two images of 2 x 2 and 2 x 4 patches."""
    right = dataset[5].extent
    assert [each.grid for each in right.media] == [(1, 2, 2), (1, 2, 4)]
    media = (right.media[0]._replace(grid=(1, 4, 2)), right.media[1])
    known = indexed(dataset, media=media)
    source = local_source(
        known,
        micro_batch_size=1,
        consumed_samples=5,
        bad_samples=(met := BadSamples("skip")),
        workers=WorkerSettings(processes=processes),
        text=False,
    )
    (planned,) = source.next_step()
    loaded = unit_of(planned).shares[0].load()
    source.close()
    assert (met.counts, list(loaded.bad)) == ({"pixels": 1}, [0])
    message = loaded.bad[0].message
    assert message.startswith(f"{dataset.rows.path}:6: the media have grids [[1, 2, 2]], but ")
    assert "[[1, 4, 2]]" in message
    assert message.endswith(MAKE_AGAIN)


@pytest.mark.parametrize("change", ["fewer media", "length"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_that_changed_is_one_sentence_with_its_place(dataset, change, packed):
    known, path = indexed(dataset), dataset.rows.path
    lines = path.read_text().splitlines(keepends=True)
    other = {"fewer media": lines[4], "length": lines[5].replace('"5"', '"5 5 5"')}[change]
    assert other != lines[5]
    path.write_text("".join([*lines[:5], other, *lines[6:]]))
    known.rows = JsonlIndex(path)
    said = {
        "fewer media": r"rows\.jsonl:6: the row has 1 media, fewer than by its index\. Make the",
        "length": r"rows\.jsonl:6: the sample has \d+ tokens, but \d+ by the index .* Make the",
    }[change]
    options: dict[str, Any] = {"look_ahead": 4} if packed else {}
    batches = local_loader(known, micro_batch_size=1, bad_samples=BadSamples("skip"), **options)
    given: list[Any] = []
    with pytest.raises((ValueError, ChangedFileError), match=said):
        given.extend(iter(lambda: next(batches), None))
    assert len(given) <= 5
