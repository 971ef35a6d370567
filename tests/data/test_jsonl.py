import os
from collections.abc import Callable
from pathlib import Path

import pytest

from loongplug.data.jsonl import JsonlIndex

pytestmark = pytest.mark.quick


def test_reads_rows_in_any_order_and_keeps_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"a": "é"}\n\n  \r\n{"a": 2}\r\n{"a": 3}'.encode())
    index = JsonlIndex(path)
    assert len(index) == 3
    assert [index.read(i)["a"] for i in (2, 0, 1)] == [3, "é", 2]
    assert [index.where(i) for i in range(3)] == [f"{path}:{line}" for line in (1, 4, 5)]


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"rows\.jsonl has no rows"):
        JsonlIndex(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No data file at .*nothing\.jsonl"):
        JsonlIndex(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', r"rows\.jsonl:2: not JSON"),
        ("[1, 2]", r"rows\.jsonl:2: a JSON list where an object was expected"),
    ],
)
def test_bad_line_names_its_place(write_rows: Callable[..., Path], line: str, message: str) -> None:
    index = JsonlIndex(write_rows("{}", line))
    assert index.read(0) == {}
    with pytest.raises(ValueError, match=message):
        index.read(1)


def test_bytes_that_are_no_text_name_their_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: not JSON"):
        JsonlIndex(path).read(0)


def test_a_line_is_whole_where_the_system_gives_less_at_once(
    write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = JsonlIndex(write_rows({"a": "long enough"}, {"b": 1}))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 5), at))
    assert [index.read(0), index.read(1)] == [{"a": "long enough"}, {"b": 1}]
