"""``loongplug data index``: what it keeps of each row, and when an index does not fit any more."""

import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from energon_folders import of_demo
from surveyed import settings_of
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.data import extent_index
from loongplug.data.blend import Blend, Rows, open_rows
from loongplug.data.check import index
from loongplug.data.data_options import PixelLimits, RowAccess
from loongplug.data.dataset import ChatDataset
from loongplug.data.extent_index import IndexedExtents, kept_table
from loongplug.data.processor import Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.row_files import JsonlIndex
from loongplug.data.survey_settings import SurveySettings

pytestmark = pytest.mark.quick

SEQ_LENGTH = 40


@pytest.fixture
def path(write_rows: Callable[..., Path], write_image: Callable[..., str], row: Any) -> Path:
    """Rows with no image to two, a row that cannot be used, and one above SEQ_LENGTH."""
    names = [write_image(f"{w}.png", height=32, width=w, seed=w) for w in (32, 64, 96)]
    gone = row("Read", "1", images=("gone.png",))
    good = [row("Read", "1" * (n + 1), images=tuple(names[:n])) for n in (2, 0, 1)]
    return write_rows(good[0], gone, *good[1:], row("Read", "1" * 60))


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


def test_lengths_and_grids_are_those_of_training(
    path: Path, processor: Processor, settings: SurveySettings
) -> None:
    made = command(path, "--tokenizer-model", settings.folder)
    assert (made.exit_code, made.stdout.count("\n")) == (0, 1)
    assert made.stdout.startswith(f"{path}:2: no image file at")
    assert "5 rows in" in made.stderr
    assert "1 of which cannot be used" in made.stderr
    rows = JsonlIndex(path)
    sizes = kept_table(rows, settings)
    assert sizes is not None
    assert isinstance(sizes.tokens.base, np.memmap)
    expected = training(path, processor)
    assert expected[1] == expected[4] == 0
    lengths = lengths_of(rows, settings)
    assert lengths is not None
    assert lengths.tolist() == expected
    # The index itself is for any length of a sequence.
    assert sizes.tokens.tolist() == [*expected[:4], sizes.tokens[4]]
    assert sizes.tokens[4] > SEQ_LENGTH
    dataset = ChatDataset(rows, processor=processor, seq_length=SEQ_LENGTH, training_phase="sft")
    for row in (0, 2, 3):
        assert sizes.row(row) == dataset[row].extent
    assert sizes.grids.tolist() == [[1, 2, 2], [1, 2, 4], [1, 2, 2]]


@pytest.mark.parametrize("weights", [None, (0.3, 0.7)])
def test_of_a_blend_each_file_has_its_own(
    path: Path,
    weights: tuple[float, float] | None,
    processor: Processor,
    settings: SurveySettings,
) -> None:
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


def test_an_index_of_parquet(path: Path, processor: Processor, settings: SurveySettings) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = path.with_name("rows.parquet")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [{"text": json.dumps(row["messages"][1])} for row in rows]
    parquet.write_table(arrow.Table.from_pylist(rows), table)
    options = ("--tokenizer-model", settings.folder, "--training-phase", "pretrain")
    assert command(table, *options).exit_code == 0
    assert table.with_name("rows.parquet.lengths").is_file()
    pretrain = dataclasses.replace(settings, training_phase="pretrain")
    of_table = open_rows([str(table)], flag="", seed=1)
    lengths = lengths_of(of_table, pretrain)
    assert lengths is not None
    assert (lengths > 0).tolist() == [True] * 4 + [False]


def test_of_an_energon_folder_the_split_that_is_trained_on(demo: Path, tmp_path: Path) -> None:
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
    "confined": ({"access": RowAccess(confine_media=True)}, "confine_media was False, is True"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_settings_are_refused_with_the_command_that_helps(
    path: Path, settings: SurveySettings, name: str
) -> None:
    make(path, settings)
    change, said = CHANGES[name]
    other = dataclasses.replace(settings, **change)
    with pytest.raises(ValueError, match=said) as raised:
        kept_table(JsonlIndex(path), other)
    message = str(raised.value)
    assert message.startswith(f"{path}.lengths is of other rows or settings (settings {said}): ")
    if name == "videos":  # the folder decides
        return
    words = shlex.split(message.split("`")[1])
    assert words[:4] == ["loongplug", "data", "index", str(path)]
    assert command(*words[3:]).exit_code == 0
    assert kept_table(JsonlIndex(path, access=other.access), other) is not None


def test_other_rows_or_another_processor_are_refused(
    path: Path, settings: SurveySettings, tmp_path: Path
) -> None:
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
def test_a_damaged_index_is_refused(
    path: Path, settings: SurveySettings, damage: Callable[[bytes], bytes], said: str
) -> None:
    make(path, settings)
    place = Path(f"{path}.lengths")
    place.write_bytes(damage(place.read_bytes()))
    with pytest.raises(ValueError, match=f"{place} {said}") as raised:
        kept_table(JsonlIndex(path), settings)
    assert "make it again with `loongplug data index" in str(raised.value)
    make(path, settings)
    assert kept_table(JsonlIndex(path), settings) is not None


def test_where_the_folder_cannot_be_written_it_is_in_the_cache(
    path: Path, settings: SurveySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_file_that_is_written_to_meanwhile_has_no_index(
    path: Path, settings: SurveySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loongplug.data import check as module

    def late(*args: Any, **options: Any) -> Any:
        with path.open("a") as file:
            file.write("{}\n")
        yield from ()

    monkeypatch.setattr(module, "map_rows", late)
    with pytest.raises(ValueError, match=r"rows\.jsonl changed while it was read"):
        make(path, settings)
    assert not Path(f"{path}.lengths").exists()
