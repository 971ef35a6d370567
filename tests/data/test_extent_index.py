"""Indexes of extents: who makes them, what they have of each row, when one fits no more."""

import dataclasses
import json
import multiprocessing
import os
import re
import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from energon_folders import of_demo
from surveyed import settings_of
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.data import check, extent_index
from loongplug.data.blend import Blend, Rows, open_rows, sources_of
from loongplug.data.check import index, index_beside
from loongplug.data.data_options import PixelLimits, RowAccess
from loongplug.data.dataset import ChatDataset, Surveyor
from loongplug.data.extent_index import ExtentTable, IndexedExtents, kept_table
from loongplug.data.processor import Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.row_files import JsonlIndex
from loongplug.data.survey_settings import SurveySettings
from loongplug.data.workers import Pool

pytestmark = pytest.mark.quick

SEQ_LENGTH = 40


@pytest.fixture
def path(write_rows, write_image, row) -> Path:
    """Rows with no image to two, one that is gone, one with a fault, and one above SEQ_LENGTH."""
    names = [write_image(f"{w}.png", height=32, width=w, seed=w) for w in (32, 64)]
    return write_rows(
        row("Read", "1", images=tuple(names)),
        row("Read", "2", images=("gone.png",)),
        row("Read", "3"),
        row("Read", ""),
        row("Read", "5", images=tuple(names[1:])),
        row("Read", "6" * 60, images=tuple(names[:1])),
    )


def command(*arguments: str | Path) -> Any:
    words = ("data", "index", *map(str, arguments), "--processes", "1")
    return CliRunner().invoke(app, words)


def make(path: Path, settings: SurveySettings) -> None:
    index([str(path)], settings, processes=1)


def lengths_of(rows: Rows, settings: SurveySettings) -> Any:
    extents = IndexedExtents.of(rows, settings)
    return None if extents is None else extents.lengths(seq_length=SEQ_LENGTH)


def training(rows: Path | Rows, processor: Processor) -> list[int]:
    """Lengths of the samples that training makes; 0 for those that it refuses."""
    dataset = ChatDataset(rows, processor=processor, seq_length=SEQ_LENGTH, training_phase="sft")
    return [len(sample) for sample in dataset.text_parts(range(len(dataset)))]


def run_check(path: Path, settings: SurveySettings) -> Any:
    words = ["check", path, "--tokenizer-model", settings.folder, "--seq-length", SEQ_LENGTH]
    words += [] if settings.video_fps is None else ["--video-fps", settings.video_fps]
    return CliRunner().invoke(app, ["data", *map(str, words), "--processes", "1"])


def content(place: Path) -> Any:
    """Note and arrays of an index."""
    note, table = ExtentTable.read(place)
    arrays = {name: getattr(table, name) for name in extent_index._ARRAYS}
    return note, {name: each.tolist() for name, each in arrays.items()}, table.remarks.found


def indexes(path: Path) -> list[Path]:
    """Of a file, or of files of such a name."""
    return [*path.parent.glob(f"{path.name}*.lengths")]


def test_the_check_and_the_command_make_the_index_that_training_takes(path, settings, processor):
    checked = run_check(path, settings)
    assert checked.exit_code == 1
    assert "3 cannot be used (1 length, 1 media, 1 row)" in checked.stderr
    (place,) = indexes(path)
    of_check = content(place)
    place.unlink()
    made = command(path, "--tokenizer-model", settings.folder)
    assert made.exit_code == 0
    assert [line.split(": ")[0] for line in made.stdout.splitlines()] == [f"{path}:2", f"{path}:4"]
    assert "6 rows in" in made.stderr
    assert "2 of which cannot be used" in made.stderr
    (place,) = indexes(path)
    assert content(place) == of_check
    rows = JsonlIndex(path)
    table = kept_table(rows, settings)
    assert table is not None
    assert isinstance(table.tokens.base, np.memmap)
    # The index itself is for any length of a sequence.
    assert (table.tokens > 0).tolist() == [True, False, True, False, True, True]
    found = IndexedExtents.of(rows, settings)
    assert found is not None
    lengths = found.lengths(seq_length=SEQ_LENGTH).tolist()
    assert [length > 0 for length in lengths] == [True, False, True, False, True, False]
    assert lengths == training(path, processor)
    data = ChatDataset(rows, processor=processor, seq_length=SEQ_LENGTH, training_phase="sft")
    for row in (0, 2, 4):
        assert table.row(row) == data[row].extent
    data.extents = found
    assert [len(sample) for sample in data.text_parts(range(6))] == lengths
    assert table.grids.tolist() == [[1, 2, 2], [1, 2, 4], [1, 2, 4], [1, 2, 2]]
    # It is not replaced by what nobody asked for, nor are others' in the way of it.
    before, other = place.read_bytes(), dataclasses.replace(settings, video_fps=3.0)
    run_check(path, other)
    assert place.read_bytes() == before
    assert all(kept_table(JsonlIndex(path), each) is not None for each in (settings, other))


@pytest.mark.parametrize("weights", [None, (0.3, 0.7)])
def test_of_a_blend_each_file_has_its_own(path, weights, processor, settings):
    other = path.with_name("array.json")
    other.write_text(json.dumps([json.loads(line) for line in path.read_text().splitlines()[2:]]))
    names = [str(path), str(other)]
    values = names if weights is None else [f"{weights[0]}", names[0], f"{weights[1]}", names[1]]
    rows = open_rows(values, flag="--train-data-path", seed=3)
    assert isinstance(rows, Blend)
    make(path, settings)
    assert lengths_of(rows, settings) is None
    command(*values, "--tokenizer-model", settings.folder)
    lengths = lengths_of(rows, settings)
    assert lengths is not None
    assert lengths.tolist() == training(rows, processor)
    part = open_rows(values, flag="--train-data-path", seed=3, valid_share=0.3)
    lengths = lengths_of(part, settings)
    assert lengths is not None
    assert len(lengths) < len(rows)
    assert lengths.tolist() == training(part, processor)


def test_of_an_energon_folder_the_split_that_is_trained_on(demo, tmp_path):
    pytest.importorskip("megatron.energon")
    folder = of_demo(demo, tmp_path / "shards", shards=2, validation=4)
    settings = settings_of(demo / "processor")
    make(folder, settings)
    rows, held_out = (
        open_rows([str(folder)], flag="", seed=1, split=split) for split in ("train", "val")
    )
    lengths = lengths_of(rows, settings)
    assert lengths is not None
    assert lengths.tolist() == training(rows, load_processor(settings.folder))
    assert lengths_of(held_out, settings) is None


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "phase": ({"training_phase": "pretrain"}, "training_phase was sft, is pretrain"),
    "pixels": (
        {"pixel_limits": PixelLimits(max_pixels=2048)},
        "max_pixels was None, is 2048",
    ),
    "fps": ({"video_fps": 3.0}, "video_fps was None, is 3.0"),
    "videos": ({"timestamps": False}, "video_timestamps was True, is False"),
    "special": ({"special_tokens_in_text": True}, "special_tokens_in_text was False, is True"),
    "rows": ({"access": RowAccess(max_row_mib=3)}, "max_row_mib was 64, is 3"),
    "ignored": (
        {"access": RowAccess(ignore_keys="x, score")},
        "ignore_keys was [], is ['score', 'x']",
    ),
    "columns": ({"access": RowAccess(columns="query=b")}, "columns was {}, is {'b': 'query'}"),
    "confined": ({"access": RowAccess(confine_media=True)}, "confine_media was False, is True"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_settings_are_refused_with_the_command_that_helps(path, settings, name):
    make(path, settings)
    change, said = CHANGES[name]
    other = dataclasses.replace(settings, **change)
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        kept_table(JsonlIndex(path), other)
    message = str(raised.value)
    assert message.startswith(f"{path}.lengths is of other rows or settings (settings {said}): ")
    if name == "videos":  # the folder decides
        return
    words = shlex.split(message.split("`")[1])
    assert words[:4] == ["loongplug", "data", "index", str(path)]
    assert command(*words[3:]).exit_code == 0
    assert kept_table(JsonlIndex(path, access=other.access), other) is not None


def test_other_rows_or_another_processor_are_refused(path, settings, tmp_path):
    make(path, settings)
    folder = tmp_path / "processor"
    shutil.copytree(settings.folder, folder)
    same = dataclasses.replace(settings, folder=folder)
    assert kept_table(JsonlIndex(path), same) is not None
    with (folder / "chat_template.jinja").open("a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match="chat_template"):
        kept_table(JsonlIndex(path), same)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(ValueError, match=r"rows digest was .*: make it again"):
        kept_table(JsonlIndex(path), settings)
    Path(f"{path}.lengths").unlink()
    assert kept_table(JsonlIndex(path), settings) is None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: b"", "is no index of this version"),
        (lambda content: content[:20], "is no index of this version"),
        (lambda content: b"x" * len(content), "is no index of this version"),
        (lambda content: content[:-4], "is no index of this version"),
        (lambda content: content + bytes(4), "is no index of this version"),
        (lambda content: content.replace(b'extents":"3"', b'extents":"2"'), "is no index of this"),
        (lambda content: b"loonglen" + bytes(40), "is no index of this version"),  # an old one
    ],
)
def test_a_damaged_index_is_refused(path, settings, damage, said):
    make(path, settings)
    place = Path(f"{path}.lengths")
    place.write_bytes(damage(place.read_bytes()))
    with pytest.raises(ValueError, match=f"{place} {said}") as raised:
        kept_table(JsonlIndex(path), settings)
    assert "make it again with `loongplug data index" in str(raised.value)
    make(path, settings)
    assert kept_table(JsonlIndex(path), settings) is not None


def test_where_the_folder_cannot_be_written_it_is_in_the_cache(
    path, settings, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    put_whole = extent_index.put_whole

    def refuse(place: Path) -> Any:
        if place.parent == path.parent:
            raise PermissionError(13, "read-only")
        return put_whole(place)

    make(path, settings)
    path.write_text(path.read_text() + "\n")  # what lies beside it does not fit any more
    monkeypatch.setattr(extent_index, "put_whole", refuse)
    make(path, settings)
    assert kept_table(JsonlIndex(path), settings) is not None
    assert len(os.listdir(tmp_path / "cache" / "loongplug")) == 1
    monkeypatch.setattr(extent_index, "put_whole", lambda _: refuse(path))
    assert "cannot be kept anywhere" in command(path, "--tokenizer-model", settings.folder).stderr


def test_a_file_that_is_written_to_meanwhile_has_no_index(path, settings, monkeypatch):
    def late(*args: Any, **options: Any) -> Any:
        with path.open("a") as file:
            file.write("{}\n")
        yield from ()

    monkeypatch.setattr(check, "map_rows", late)
    with pytest.raises(ValueError, match=r"rows\.jsonl changed while it was read"):
        make(path, settings)
    assert not Path(f"{path}.lengths").exists()


def beside(path: Path, settings: SurveySettings) -> None:
    """As a run has it made, to the end."""
    sources = sources_of(open_rows([str(path)], flag="", seed=1))
    surveyor = Surveyor.of(settings, seq_length=SEQ_LENGTH)  # a run's knows its --seq-length
    works: list[Future[None]] = []
    submit = Pool.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "submit", lambda *job: works.append(submit(*job)))
        pool = index_beside(sources, surveyor, settings)
    wait(works)
    pool.close()


def test_a_check_does_without_an_index_where_none_can_be_kept(path, settings, monkeypatch):
    expected = run_check(path, settings)
    indexes(path)[0].unlink()

    def refuse(place: Path) -> Any:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(extent_index, "put_whole", refuse)
    found = run_check(path, settings)
    assert (found.exit_code, found.stdout) == (1, expected.stdout)
    assert "3 cannot be used" in found.stderr
    assert kept_table(JsonlIndex(path), settings) is None


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_is_made_beside_a_run_is_what_the_command_makes(
    path, processor_folder, tmp_path, monkeypatch, elsewhere
):
    """In a process of the lowest priority."""
    folder = tmp_path / "indexes" if elsewhere else None
    settings = settings_of(processor_folder, index_dir=folder)
    if folder is not None:
        folder.mkdir()
    (place,) = index([str(path)], settings, processes=1)
    assert place.parent == (folder or path.parent)
    expected = content(place)
    place.unlink()
    noted, keep = tmp_path / "noted.json", check.keep_survey

    def kept(*values: Any, **options: Any) -> Path:
        noted.write_text(json.dumps([os.getpid(), os.nice(0)]))
        return keep(*values, **options)

    monkeypatch.setattr(check, "keep_survey", kept)
    beside(path, settings)
    process, priority = json.loads(noted.read_text())
    assert (process != os.getpid(), priority) == (True, 19)
    (place,) = indexes((folder or path.parent) / f"*{path.name}")
    assert content(place) == expected
    assert bool(indexes(path)) != elsewhere
    assert kept_table(JsonlIndex(path), settings) is not None


def test_it_ends_with_its_pool(path, settings, monkeypatch):
    """Also where nobody closes that: a run that is told to end does not wait for the index."""
    read, write = os.pipe()
    monkeypatch.setattr(check, "keep_survey", lambda *values, **options: os.read(read, 1))
    closing: list[Callable[[], None]] = []
    monkeypatch.setattr("loongplug.data.workers.atexit.register", closing.append)
    sources = sources_of(open_rows([str(path)], flag="", seed=1))
    pool = index_beside(sources, Surveyor.of(settings), settings)
    assert closing == [pool.close]
    pool.close()
    os.close(read)
    os.close(write)
    assert not multiprocessing.active_children()


def test_files_of_one_name_have_indexes_of_their_own(path, processor_folder, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / path.name
    other.write_text(path.read_text().splitlines()[-1] + "\n")
    settings = settings_of(processor_folder, index_dir=tmp_path / "indexes")
    kept = index([str(path), str(other)], settings, processes=1)
    assert len({*kept}) == 2
    tables = [kept_table(JsonlIndex(each), settings) for each in (path, other)]
    assert [len(table.tokens) for table in tables if table is not None] == [6, 1]


def test_an_index_that_is_made_again_counts(path, settings):
    """Before one that a run had made beside itself, while a medium was missing."""
    lost = path.parent / "32.png"
    content = lost.read_bytes()
    lost.unlink()
    beside(path, settings)
    lost.write_bytes(content)
    wrong = kept_table(JsonlIndex(path), settings)
    index([str(path)], settings, processes=1)
    right = kept_table(JsonlIndex(path), settings)
    assert wrong is not None
    assert right is not None
    assert (wrong.tokens.tolist()[0], right.tokens.tolist()[0] > 0) == (0, True)
    assert wrong.digest != right.digest
