"""Where lines start, and the index files that large files have beside them."""

import io
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from loongplug.data import cache_folder
from loongplug.data import row_files as module
from loongplug.data.row_files import line_index, scan_lines

pytestmark = pytest.mark.quick


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A small file that counts as a large one."""
    monkeypatch.setattr(module, "_WORTH_KEEPING", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "rows.jsonl"
    file.write_bytes(b'{"a": 1}\n\n{"a": 2}\n')
    return file


def no_scan(_: Path) -> None:
    raise AssertionError("read the file")


@given(content=st.text("a \n\r\t", max_size=40).map(str.encode), piece=st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_lines_start_where_python_says(tmp_path_factory, content, piece):
    file = tmp_path_factory.mktemp("lines") / "f"
    file.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        found = list(scan_lines(file))
    lines = content.split(b"\n")
    starts = np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
    expected = [(s, n) for n, (s, line) in enumerate(zip(starts, lines, strict=True), 1)
                if line.strip()]  # fmt: skip
    assert found == expected


def test_the_second_time_nothing_is_read(path, monkeypatch):
    first = line_index(path)
    assert [p.name for p in sorted(path.parent.iterdir())] == ["rows.jsonl", "rows.jsonl.index"]
    monkeypatch.setattr(module, "scan_lines", no_scan)
    for index in (first, line_index(path)):
        assert isinstance(index, np.memmap)
        assert index.tolist() == [[0, 1], [10, 3]]


def test_a_small_file_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    line_index(tmp_path / "rows.jsonl")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("change", ["size", "time"])
def test_a_changed_file_is_read_anew(path, change):
    line_index(path)
    if change == "size":
        path.write_bytes(b"\n" * 5 + b"{}\n")
    else:
        state = path.stat()
        path.write_bytes(b'\n{"a": 1}\n{"a": 2}\n')
        assert path.stat().st_size == state.st_size
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert line_index(path)[:, 1].tolist() == ([6] if change == "size" else [2, 3])


DAMAGED = "is cut off, damaged or of another version of LoongPlug"


def with_word(content: bytes, place: int, word: int) -> bytes:
    return content[: 8 * place] + word.to_bytes(8, "little") + content[8 * (place + 1) :]


def with_arrays(content: bytes) -> bytes:
    """The content as an archive of arrays, which numpy reads, too."""
    file = io.BytesIO()
    np.savez(file, np.load(io.BytesIO(content)))
    return file.getvalue()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: b"", DAMAGED),
        (lambda content: content[:-8], DAMAGED),
        (lambda content: content.replace(b"(3, 2)", b"(0, 2)"), DAMAGED),
        (lambda content: content.replace(b"(3, 2)", b"(2, 2)"), DAMAGED),  # lacks the last row
        (lambda content: content.replace(b"(3, 2)", b"(3, 2\x1a"), DAMAGED),
        (lambda content: content.replace(b"(3, 2)", b"(3,02)"), DAMAGED),
        (with_arrays, DAMAGED),
        # Behind numpy's header and two words, the offset of the first row, then of the second.
        (lambda content: with_word(content, 18, 10), DAMAGED),
        (lambda content: with_word(content, 20, 10 + 2**40), DAMAGED),
        (lambda content: with_word(content, 20, 10 + 2**63), DAMAGED),
        # Behind numpy's header, the file's time of change.
        (lambda content: with_word(content, 17, 1), "is of what the file was before it changed"),
    ],
)
def test_a_damaged_index_file_is_replaced_and_that_is_said(path, caplog, damage, said):
    place = path.with_name("rows.jsonl.index")
    line_index(path)
    whole = place.read_bytes()
    place.write_bytes(damage(whole))
    caplog.clear()
    with cache_folder.said_by(first=False):  # as on all ranks but one
        assert line_index(path)[:, 0].tolist() == [0, 10]
    assert caplog.messages == []
    place.write_bytes(damage(whole))
    with cache_folder.said_by(first=True):
        assert line_index(path)[:, 0].tolist() == [0, 10]
    assert caplog.messages == [f"{place} {said}: it is made again from {path}."]
    assert place.read_bytes() == whole
    caplog.clear()
    line_index(path)
    assert caplog.messages == []


def test_a_folder_that_cannot_be_written_to_is_left_alone(path, tmp_path, monkeypatch):
    make = module.put_whole

    def refuse(place: Path) -> AbstractContextManager[Path]:
        if place.parent == path.parent:
            raise PermissionError("read-only")
        return make(place)

    monkeypatch.setattr(module, "put_whole", refuse)
    line_index(path)
    assert [p.name for p in path.parent.iterdir()] == ["rows.jsonl"]
    assert len(list((tmp_path / "cache" / "loongplug").iterdir())) == 1
    monkeypatch.setattr(module, "scan_lines", no_scan)
    assert line_index(path)[:, 0].tolist() == [0, 10]


def test_without_any_place_to_write_it_is_read_each_time(path, monkeypatch):
    def refuse(_: Path) -> AbstractContextManager[Path]:
        raise OSError("no space")

    monkeypatch.setattr(module, "put_whole", refuse)
    assert line_index(path)[:, 0].tolist() == [0, 10]
    assert [p.name for p in path.parent.iterdir()] == ["rows.jsonl"]


def test_a_write_that_fails_leaves_nothing_behind(path, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(cache_folder.os, "replace", fail)
    assert line_index(path)[:, 0].tolist() == [0, 10]
    assert [p.name for p in path.parent.iterdir()] == ["rows.jsonl"]
    assert list((tmp_path / "cache" / "loongplug").iterdir()) == []


def test_a_file_that_is_being_written_is_refused(path, monkeypatch):
    scan = module.scan_lines

    def scan_while_written(file: Path) -> Iterator[tuple[int, int]]:
        yield from scan(file)
        with file.open("ab") as more:
            more.write(b"{}\n")

    monkeypatch.setattr(module, "scan_lines", scan_while_written)
    with pytest.raises(ValueError, match=r"rows\.jsonl changed while it was read"):
        line_index(path)


def _open(rank: int, *, path: Path) -> list[list[int]]:
    return [line_index(path)[:, 0].tolist() for _ in range(20)]


def test_ranks_that_start_together_do_not_disturb_each_other(path):
    path.write_bytes(b'{"a": 1}\n' * 1000)
    expected = [[9 * i for i in range(1000)]] * 20
    assert run_ranks(_open, 4, path=path, timeout=60.0) == [expected] * 4
    assert sorted(p.name for p in path.parent.iterdir()) == ["rows.jsonl", "rows.jsonl.index"]
