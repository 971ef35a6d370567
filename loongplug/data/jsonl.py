"""Rows of a JSONL or JSON file by index, without holding the file in memory."""

from pathlib import Path
from typing import Any

from loongplug.data.bad_samples import told
from loongplug.data.kept_files import require_version, version
from loongplug.data.line_index import is_array, line_index
from loongplug.data.media_files import MediaRoot
from loongplug.data.object_store import RemoteFile
from loongplug.data.rows import ANY_ROW, RowAccess, parse_row_json

# How files begin that people take for rows.
_OTHER_KINDS = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}


class JsonlIndex:
    """The rows of a JSONL file that are not blank, or of a JSON array, by index.

    Opening reads the file once, or the index file that is kept of a large one. Rows are read with a
    fresh file handle each, so that forked processes never share a file position.
    """

    def __init__(
        self, path: str | Path, *, access: RowAccess = ANY_ROW, copy_of: RemoteFile | None = None
    ) -> None:
        self.path = Path(path)
        self.files = (self.path,)
        self.access = access
        self._shown = copy_of or self.path
        self._media_root = access.media_of(self._shown)
        if not self.path.is_file():
            raise ValueError(f"No data file at {self.path}: expected a JSONL file.")
        _require_text(self.path)
        self._version = version(self.path)
        self._array = is_array(self.path)
        self._index = line_index(self.path, array=self._array)
        if not len(self._index):
            raise ValueError(f"{self.path} has no rows: a dataset needs at least one line of JSON.")

    def __len__(self) -> int:
        return len(self._index)

    def where(self, index: int) -> str:
        """``path:line`` of a row, for messages; many rows of an array may be in one line."""
        row = f" row {index + 1}" if self._array else ""
        return f"{self._shown}:{self._index[index, 1]}{row}"

    def media_root(self, index: int) -> MediaRoot:
        """What relative paths in the row start at."""
        return self._media_root

    def read(self, index: int) -> dict[str, Any]:
        """The row as a dictionary; ValueError when it is too large or no JSON object."""
        content, where = self._row(index), self.where(index)
        what = "element" if self._array else "line"
        with told(f"{where}: ", f". Each {what} must be one JSON object."):
            row = parse_row_json(content)
        if not isinstance(row, dict):
            raise ValueError(
                f"{where}: a JSON {type(row).__name__} where an object was expected:"
                ' {"messages": [...]}.'
            )
        return self.access.by_our_keys(row, where=where)

    def _row(self, index: int) -> bytes:
        """What the file has of the row."""
        require_version(self.path, self._version)
        start, last = int(self._index[index, 0]), index + 1 == len(self._index)
        end = self._version[0] if last else int(self._index[index + 1, 0])
        with self.path.open("rb") as file:
            file.seek(start)
            # Blank lines may follow, so what is up to the next row may be larger than the row.
            found = file.read(min(end - start, self.access.max_row_mib * 2**20 + 1))
        if self._array:  # an object, and what stands between it and the next
            self.access.require_size(end - start, where=self.where(index))
            return found.rstrip(b" \t\r\n,]")
        line, newline, _ = found.partition(b"\n")
        if not newline:
            self.access.require_size(end - start, where=self.where(index))
        return line


def _require_text(path: Path) -> None:
    """ValueError for a file of another kind, once and not for each of its lines."""
    with path.open("rb") as file:
        head = file.read(8)
    for magic, kind in _OTHER_KINDS.items():
        if head.startswith(magic):
            raise ValueError(
                f"{path} is {kind}: expected JSONL, one JSON object on each line in UTF-8, or one"
                " JSON array of them. Convert it first."
            )
