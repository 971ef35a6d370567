"""Parquet files and saved datasets: their rows are those of JSONL."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from ranks import run_ranks
from surveyed import media_in

from loongplug.data import arrow_rows as module
from loongplug.data.arrow_rows import ArrowRows
from loongplug.data.blend import open_rows
from loongplug.data.data_options import RowAccess
from loongplug.data.dataset import ChatDataset
from loongplug.data.media_files import ChangedFileError
from loongplug.data.media_loader import MediaLoader
from loongplug.data.processor import Processor

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_BATCH", 2)  # several batches of a few rows
    return tmp_path / "cache"


@pytest.fixture
def rows(write_image) -> list[dict[str, Any]]:
    """Rows of several formats, which a table pads with null."""
    image, other = (write_image(f"{n}.png", height=64, width=32 * n, seed=n) for n in (1, 2))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    return [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]},
                      {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}]}
        for text in ("Is it?", "Is it so?")
    ] + [
        {"messages": [{"role": "user", "content": parts},
                      {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]},
        {"text": "<image>\nA cat.", "images": [other]},
        {"conversations": [{"from": "human", "value": "<image><image>Which?"},
                           {"from": "gpt", "value": "One.", "loss": False},
                           {"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "Yes."}],
         "images": [image, other]},
    ]  # fmt: skip


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """A table that has every key of any row in all of them."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return pa.table({key: [row.get(key) for row in rows] for key in keys})


def save_to_disk(rows: list[dict[str, Any]], folder: Path, *, shards: int = 2) -> Path:
    """What ``datasets`` writes: streams of Arrow, and a file that names them."""
    folder.mkdir()
    table = table_of(rows)
    names = [f"data-{shard:05}-of-{shards:05}.arrow" for shard in range(shards)]
    each = -(-len(rows) // shards)
    for shard, name in enumerate(names):
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table.slice(shard * each, each), max_chunksize=2)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))
    return folder


def dataset(path: Path, processor: Processor, *, root: Path) -> ChatDataset:
    access = RowAccess(media_root=root)
    return ChatDataset(
        open_rows([str(path)], flag="--data-path", seed=0, access=access),
        processor=processor,
        seq_length=512,
        training_phase="pretrain",
    )


def require_equal_samples(one: ChatDataset, other: ChatDataset) -> None:
    assert len(one) == len(other)
    for index in (*range(len(one)), 0):  # in order and out of it
        first, second = one[index], other[index]
        for name in ("input_ids", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
        assert first.extent == second.extent


def test_the_same_rows_are_the_same_samples(rows, write_rows, tmp_path, processor):
    expected = dataset(write_rows(*rows), processor, root=tmp_path)
    table = table_of(rows)
    one, folder = tmp_path / "rows.parquet", tmp_path / "shards"
    parquet.write_table(table, one, row_group_size=3)
    folder.mkdir()
    for number in range(2):
        parquet.write_table(table.slice(number * 3, 3), folder / f"part-{number}.parquet")
    for path in (one, folder, save_to_disk(rows, tmp_path / "saved")):
        require_equal_samples(expected, dataset(path, processor, root=tmp_path))


@pytest.mark.parametrize("form", ["struct", "binary", "path"])
def test_images_in_a_table_are_those_of_files(rows, write_rows, tmp_path, processor, form):
    def held(name: str) -> Any:
        content = (tmp_path / name).read_bytes()
        if form == "path":
            return {"bytes": None, "path": name}
        return content if form == "binary" else {"bytes": content, "path": "elsewhere.png"}

    table = json.loads(json.dumps(rows))
    for row in table:
        if "images" in row:
            row["images"] = [held(name) for name in row["images"]]
        for message in row.get("messages", ()):
            for part in message["content"]:
                if "image" in part:
                    part["image"] = held(part["image"])
    path = tmp_path / "rows.parquet"
    parquet.write_table(table_of(table), path)
    expected = dataset(write_rows(*rows), processor, root=tmp_path)
    found = dataset(path, processor, root=tmp_path)
    require_equal_samples(expected, found)
    loader = MediaLoader(processor, videos=found.videos)
    for index in range(2, len(rows)):
        pixels = [loader.load(media_in(each, index), where="").rows for each in (expected, found)]
        assert (pixels[0] == pixels[1]).all()


def test_a_row_says_where_it_stands(rows, tmp_path):
    """As ``data check`` prints it: in the file, from 1."""
    parquet.write_table(table_of(rows), tmp_path / "rows.parquet")
    for path, where in (
        (tmp_path / "rows.parquet", "rows.parquet:4"),
        (save_to_disk(rows, tmp_path / "saved"), "saved/data-00001-of-00002.arrow:1"),
    ):
        assert ArrowRows(path).where(3) == f"{tmp_path}/{where}"


def test_a_parquet_file_is_converted_once_and_again_when_it_changes(tmp_path, caplog):
    path, kept = tmp_path / "rows.parquet", tmp_path / "rows.parquet.arrow"
    texts = pa.array(["a", "b", "a"]).dictionary_encode()  # as pandas writes categories
    parquet.write_table(pa.table({"text": texts}), path)
    assert [ArrowRows(path).read(row)["text"] for row in range(3)] == ["a", "b", "a"]
    assert caplog.messages == [f"{path} is converted to Arrow once, into {kept}."]
    state = kept.stat()
    ArrowRows(path)
    assert kept.stat() == state
    kept.write_bytes(kept.read_bytes()[:-20])
    assert len(ArrowRows(path)) == 3
    parquet.write_table(pa.table({"text": ["c"]}), path)
    assert [ArrowRows(path).read(row)["text"] for row in range(len(ArrowRows(path)))] == ["c"]
    assert len(caplog.messages) == 3
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, kept.name]


def _converted(rank: int, *, path: Path) -> tuple[bool, int]:
    written: list[Path] = []
    convert = module._convert

    def noted(*arguments: Any) -> None:
        written.append(arguments[0])
        convert(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_convert", noted)
        return bool(written), len(ArrowRows(path)) + 1000 * len(written)


def test_a_saved_dataset_that_changes_is_no_bad_row(tmp_path, rows):
    found = ArrowRows(save_to_disk(rows, tmp_path / "saved"))
    assert found.read(len(rows) - 1)
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    assert found.read(0)
    with pytest.raises(ChangedFileError, match=r"-00002\.arrow has changed since the start"):
        found.read(len(rows) - 1)


def test_of_ranks_that_start_together_one_converts(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": ["a"] * 500}), path)
    found = run_ranks(_converted, world_size=3, path=path, timeout=60)
    assert sorted(rows for _, rows in found) == [500, 500, 1500]


def damaged(folder: Path) -> Path:
    path = folder / "rows.parquet"
    parquet.write_table(pa.table({"text": ["a" * 1000]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:40] + bytes(len(content) - 80) + content[-40:])
    return path


def several(folder: Path) -> Path:
    (folder / "both").mkdir()
    save_to_disk([{"text": "a"}], folder / "both" / "train")
    (folder / "both" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return folder / "both"


def outside(folder: Path) -> Path:
    path = save_to_disk([{"text": "a"}], folder / "saved")
    (path / "state.json").write_text('{"_data_files": [{"filename": "../rows.arrow"}]}')
    return path


def empty(folder: Path) -> Path:
    path = folder / "rows.parquet"
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (damaged, "is not a Parquet file that can be read"),
        (several, "has several datasets, train: give"),
        (outside, "does not name the files of a saved dataset"),
        (empty, "has no rows"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path, make, said):
    with pytest.raises(ValueError, match=said):
        open_rows([str(make(tmp_path))], flag="--data-path", seed=0)


def test_places_that_lead_out_of_a_file_are_one_bad_row(tmp_path):
    """Arrow believes the offsets in its files; those of others are looked at before."""
    path = save_to_disk([{"text": "abcdefgh"}], tmp_path / "saved", shards=1)
    (file,) = path.glob("*.arrow")
    content = file.read_bytes()
    ends = np.array([0, 8], dtype=np.int32).tobytes()
    place = content.rindex(ends)
    beyond = np.array([0, 2**30], dtype=np.int32).tobytes()
    file.write_bytes(content[:place] + beyond + content[place + len(ends) :])
    with pytest.raises(ValueError, match=r"data-00000-of-00001\.arrow:1: the row cannot be read"):
        open_rows([str(path)], flag="--data-path", seed=0).read(0)


def test_a_row_above_the_limit_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": ["a", "b" * 2**20, "c"]}), path)
    rows = ArrowRows(path, access=RowAccess(max_row_mib=1))
    assert rows.read(2) == {"text": "c"}
    with pytest.raises(ValueError, match=r"rows\.parquet:2: the row has 1\.0 MiB"):
        rows.read(1)


def test_where_nothing_can_be_kept_that_is_told(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": ["a"]}), path)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_convert", refuse)
    with pytest.raises(ValueError, match=r"the result cannot be kept anywhere .*No space left"):
        ArrowRows(path)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"pip install 'loongplug\[parquet\]'"):
        open_rows([str(tmp_path / "rows.parquet")], flag="--data-path", seed=0)
