"""Indexes as by-products: of ``data check``, and made beside a run."""

import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from surveyed import settings_of
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.data import check, extent_index
from loongplug.data.blend import open_rows, sources_of
from loongplug.data.check import index, index_beside
from loongplug.data.dataset import ChatDataset, Surveyor
from loongplug.data.extent_index import ExtentTable, IndexedExtents, kept_table
from loongplug.data.processor import Processor
from loongplug.data.row_files import JsonlIndex
from loongplug.data.survey_settings import SurveySettings
from loongplug.data.workers import Pool

pytestmark = pytest.mark.quick

SEQ_LENGTH = 40


@pytest.fixture
def path(write_rows: Callable[..., Path], write_image: Callable[..., str], row: Any) -> Path:
    """Rows with images, without, with one that is gone, with a fault, and above SEQ_LENGTH."""
    names = [write_image(f"{w}.png", height=32, width=w, seed=w) for w in (32, 64)]
    return write_rows(
        row("Read", "1", images=tuple(names)),
        row("Read", "2", images=("gone.png",)),
        row("Read", "3"),
        row("Read", ""),
        row("Read", "5" * 60, images=tuple(names[:1])),
    )


def run_check(path: Path, settings: SurveySettings) -> Any:
    words = ["check", path, "--tokenizer-model", settings.folder, "--seq-length", SEQ_LENGTH]
    words += [] if settings.video_fps is None else ["--video-fps", settings.video_fps]
    return CliRunner().invoke(app, ["data", *map(str, words), "--processes", "1"])


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


def content(place: Path) -> Any:
    """Note and arrays of an index."""
    note, table = ExtentTable.read(place)
    arrays = {name: getattr(table, name) for name in extent_index._ARRAYS}
    return note, {name: each.tolist() for name, each in arrays.items()}, table.remarks.found


def indexes(path: Path) -> list[Path]:
    """Of a file, or of files of such a name."""
    return [*path.parent.glob(f"{path.name}*.lengths")]


def test_the_check_leaves_an_index_that_training_takes(
    path: Path, settings: SurveySettings, processor: Processor
) -> None:
    checked = run_check(path, settings)
    assert checked.exit_code == 1
    assert "3 cannot be used (1 length, 1 media, 1 row)" in checked.stderr
    (place,) = indexes(path)
    of_check = content(place)
    rows = JsonlIndex(path)
    found = IndexedExtents.of(rows, settings)
    assert found is not None
    lengths = found.lengths(seq_length=SEQ_LENGTH)
    data = ChatDataset(rows, processor=processor, seq_length=SEQ_LENGTH, training_phase="sft")
    assert lengths.tolist() == [len(sample) for sample in data.text_parts(range(5))]
    assert (lengths > 0).tolist() == [True, False, True, False, False]
    data.extents = found
    assert [len(sample) for sample in data.text_parts(range(5))] == lengths.tolist()
    place.unlink()
    (place,) = index([str(path)], settings, processes=1)
    assert content(place) == of_check
    # It is not replaced by what nobody asked for, nor are others' in the way of it.
    before, other = place.read_bytes(), replace(settings, video_fps=3.0)
    run_check(path, other)
    assert place.read_bytes() == before
    assert all(kept_table(JsonlIndex(path), each) is not None for each in (settings, other))


def test_a_check_does_without_an_index_where_none_can_be_kept(
    path: Path, settings: SurveySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    path: Path,
    processor_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: bool,
) -> None:
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


def test_of_a_file_that_changes_nothing_is_kept(
    path: Path, settings: SurveySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is said: the next run begins again."""
    made_of, calls = check.made_of, []

    def later(*values: Any) -> Any:
        calls.append(values)
        if len(calls) > 1:
            path.write_text(path.read_text() + "{}\n")
        return made_of(*values)

    monkeypatch.setattr(check, "made_of", later)
    beside(path, settings)
    assert not indexes(path)


def test_it_ends_with_its_pool(
    path: Path, settings: SurveySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_files_of_one_name_have_indexes_of_their_own(
    path: Path, processor_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / path.name
    other.write_text(path.read_text().splitlines()[-1] + "\n")
    settings = settings_of(processor_folder, index_dir=tmp_path / "indexes")
    kept = index([str(path), str(other)], settings, processes=1)
    assert len({*kept}) == 2
    tables = [kept_table(JsonlIndex(each), settings) for each in (path, other)]
    assert [len(table.tokens) for table in tables if table is not None] == [5, 1]


def test_an_index_that_is_made_again_counts(path: Path, settings: SurveySettings) -> None:
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
