import json
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongplug.data.data_options import RowAccess
from loongplug.data.media_files import ChangedFileError
from loongplug.data.row_files import JsonlIndex, scan_array
from loongplug.data.sample import bad_as

pytestmark = pytest.mark.quick


def test_reads_rows_in_any_order_and_keeps_line_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"a": "é"}\n\n  \r\n{"a": 2}\r\n{"a": 3}'.encode())
    index = JsonlIndex(path)
    assert len(index) == 3
    assert [index.read(i)["a"] for i in (2, 0, 1)] == [3, "é", 2]
    assert [index.where(i) for i in range(3)] == [f"{path}:{line}" for line in (1, 4, 5)]


@pytest.mark.parametrize("change", ["written to", "replaced", "removed"])
def test_a_file_that_changes_is_no_bad_row(tmp_path, change):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    rows = JsonlIndex(path)
    assert rows.read(1) == {"a": 2}
    if change == "written to":
        path.write_text(path.read_text() + '{"a": 3}\n')
    else:
        path.unlink()
    if change == "replaced":
        path.write_text('{"b": "longer"}\n{"b": 2}\n')
    said = set()
    for row in (0, 1):
        with (
            pytest.raises(ChangedFileError, match=r"rows\.jsonl has changed since") as raised,
            bad_as("row"),
        ):
            rows.read(row)
        said.add(str(raised.value))
    assert len(said) == 1, "ranks and rows say the same, which is printed once"


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"rows\.jsonl has no rows"):
        JsonlIndex(path)


@pytest.mark.parametrize(
    "head", [b"PAR1\x15\x04\0\0", b"\x1f\x8b\x08", "{}".encode("utf-16"), b"PK\x03\x04\0"]
)
def test_a_file_of_another_kind_is_refused(tmp_path, head):
    (tmp_path / "rows.jsonl").write_bytes(head)
    with pytest.raises(ValueError, match=r"rows.jsonl is no text in UTF-8"):
        JsonlIndex(tmp_path / "rows.jsonl")


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"No data file at .*nothing\.jsonl"):
        JsonlIndex(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', r"rows\.jsonl:2: not JSON"),
        ("[1, 2]", r"rows\.jsonl:2: a JSON list where an object was expected"),
        ("[" * 100_000, r"rows\.jsonl:2: not JSON that can be read: it is nested too deeply"),
        (
            '{"messages": [], "id": 1, "messages": [1]}',
            r'rows\.jsonl:2: an object of the row has the key "messages" twice: leave one',
        ),
        (
            '{"messages": [{"role": "user", "content": "a", "role": "assistant"}]}',
            r'rows\.jsonl:2: an object of the row has the key "role" twice',
        ),
    ],
)
def test_bad_line_names_its_place(write_rows, line, message):
    index = JsonlIndex(write_rows("{}", line))
    assert index.read(0) == {}
    with pytest.raises(ValueError, match=message):
        index.read(1)


MIB = 2**20


@pytest.fixture
def sized(tmp_path) -> Callable[..., JsonlIndex]:
    """A file of rows with so many bytes, each behind a small one, and a limit of 1 MiB."""

    def write(*sizes: int, end: bytes = b"\n") -> JsonlIndex:
        path = tmp_path / "rows.jsonl"
        rows = b"\n".join(b'{}\n{"a": "' + b"x" * (size - 9) + b'"}' for size in sizes)
        path.write_bytes(rows + end)
        return JsonlIndex(path, access=RowAccess(max_row_mib=1))

    return write


@pytest.mark.not_quick
@pytest.mark.parametrize("end", [b"", b"\n", b"\n" * (MIB + 7)])
def test_rows_up_to_the_limit_are_read_and_larger_ones_are_refused(sized, end):
    index = sized(MIB, MIB + 1, MIB, 3 * MIB, end=end)
    for number in (0, 1, 2, 4, 5, 6):
        assert len(index.read(number)) in (0, 1)
    for number, line, size in ((3, 4, "1.0"), (7, 8, "[34].0")):
        message = rf"rows\.jsonl:{line}: the row has {size} MiB, but --max-row-mib is 1: split"
        with pytest.raises(ValueError, match=message):
            index.read(number)


def most_held(act: Callable[[], object]) -> int:
    """The most bytes that Python held for it."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_of_a_row_above_the_limit_no_more_than_the_limit_is_read(sized):
    index = sized(5 * MIB)

    def refused() -> None:
        with pytest.raises(ValueError, match=r"5\.0 MiB, but --max-row-mib is 1"):
            index.read(1)

    assert MIB < most_held(refused) < 3 * MIB


class TestArray:
    @pytest.mark.parametrize("indent", [None, 2])
    def test_its_elements_are_rows(self, tmp_path, indent):
        rows = [{"a": 'é ] } , \\" \n'}, {"b": [{}, [1]]}, {}, {"c": "中" * 50}]
        path = tmp_path / "rows.json"
        text = json.dumps(rows, indent=indent, ensure_ascii=False)
        path.write_text(f" \n{text}\n\n", encoding="utf-8")
        index = JsonlIndex(path)
        assert [index.read(number) for number in (3, 1, 0, 2)] == [rows[n] for n in (3, 1, 0, 2)]
        before = text[: text.index('"b"')].rindex("{")
        second = 2 + text[:before].count("\n")
        assert index.where(1) == f"{path}:{second} row 2"

    @given(
        rows=st.lists(st.dictionaries(st.text(max_size=9), st.text(max_size=30)), max_size=9),
        indent=st.sampled_from([None, 0, 3]),
    )
    def test_whatever_stands_in_its_strings(self, tmp_path_factory, rows, indent):
        path = tmp_path_factory.mktemp("array") / "rows.json"
        path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
        assert len(list(scan_array(path))) == len(rows)
        if rows:
            index = JsonlIndex(path)
            assert [index.read(number) for number in range(len(rows))] == rows

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('[{"a": 1},\n1]', "rows.json:2: expected an object or the end"),
            ('[{"a": 1}\n{"a": 2}]', "rows.json:2: expected a comma or the end"),
            ('[{"a": 1},\n{"a": [}', "rows.json:2: an object that does not end"),
            ('[{"a": 1},\n{"a": "]}', "rows.json:2: an object that does not end"),
            ('[{"a": 1}\n', "rows.json:2: expected a comma or the end"),
            ('[{"a": 1}]\n{"a": 2}', "rows.json:2: something behind the array's end"),
        ],
    )
    def test_what_is_no_array_names_its_place(self, tmp_path, text, message):
        path = tmp_path / "rows.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            JsonlIndex(path)

    def test_a_bad_row_is_one_bad_row(self, tmp_path):
        """Only what is asked for is parsed; rows in one line are told apart."""
        path = tmp_path / "rows.json"
        path.write_text('\ufeff[{"a": 1}, {"a": nothing}, {"a": 3}]', encoding="utf-8")
        index = JsonlIndex(path)
        assert (index.read(0), index.read(2)) == ({"a": 1}, {"a": 3})
        with pytest.raises(ValueError, match=r"rows.json:1 row 2: not JSON .* Each element must"):
            index.read(1)

    def test_a_large_row_is_passed_over_without_its_being_kept(self, tmp_path):
        path = tmp_path / "rows.json"
        path.write_text(json.dumps([{"a": "x" * 2**22}, {"a": [[]] * 2**20}, {"a": 2}]))
        assert most_held(lambda: list(scan_array(path))) < 2**20
        assert len(list(scan_array(path))) == 3

    def test_a_row_above_the_limit_is_refused(self, tmp_path):
        path = tmp_path / "rows.json"
        path.write_text(json.dumps([{"a": 1}, {"a": "x" * 2**20}, {"a": 2}]))
        index = JsonlIndex(path, access=RowAccess(max_row_mib=1))
        assert (index.read(0), index.read(2)) == ({"a": 1}, {"a": 2})
        with pytest.raises(ValueError, match=r"rows.json:1 row 2: the row has 1.0 MiB"):
            index.read(1)
