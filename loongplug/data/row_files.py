"""Files of rows: what is read of one, and the rows of a JSONL or JSON file by index.

Of one JSON array, brackets and strings alone are read, so that a bad row is one bad row.
"""

import json
import re
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from loongplug.data.cache_folder import LOG, keep, places
from loongplug.data.data_options import ANY_ROW, RowAccess
from loongplug.data.media_files import (
    ConfinedFolder,
    MediaRoot,
    RemoteFolder,
    is_remote,
    require_version,
    version,
)
from loongplug.data.object_store import RemoteFile
from loongplug.data.sample import told
from loongplug.output_files import put_whole

_WORTH_KEEPING = 4 * 2**20  # bytes; a smaller file is read as quickly as its index is opened
_PIECE = 16 * 2**20  # bytes of a line that are held at a time
_HEAD = 2**16  # bytes; more blanks than that are in front of no array
_BLANKS = re.compile(rb"[ \t\n\r]*+")

# Up to the first row or the end, behind UTF-8's byte order mark.
_BEGINNING = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\n\r]*+\[[ \t\n\r]*+(?=[{\]])")

# What changes no depth: anything but brackets, and whole strings.
_PLAIN = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_NEWLINE = re.compile(rb"\n")


def media_root_of(file: Path | RemoteFile, access: RowAccess) -> MediaRoot:
    """What relative paths in the rows of this file start at."""
    folder = file.parent if access.media_root is None else access.media_root
    if is_remote(folder):
        return RemoteFolder(str(folder), confined=access.confine_media)
    folder = Path(folder)
    return ConfinedFolder(folder) if access.confine_media else folder


def parse_row_json(content: bytes) -> Any:
    """What the JSON says; ValueError, without a place, for what is none or has a key twice."""
    try:
        return json.loads(content, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("not JSON that can be read: it is nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key that it has twice, parsers differ in which of the two they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(
            f"an object of the row has the key {json.dumps(twice)[:80]} twice: leave one of them"
        )
    return found


class JsonlIndex:
    """The rows of a JSONL file that are not blank, or of a JSON array, by index."""

    def __init__(
        self, path: str | Path, *, access: RowAccess = ANY_ROW, copy_of: RemoteFile | None = None
    ) -> None:
        self.path = Path(path)
        self.files = (self.path,)
        self.access = access
        self._shown = copy_of or self.path
        self._media_root = media_root_of(self._shown, access)
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
        return self.access.by_our_keys(row, where=where) if self.access.columns else row

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
        head = file.read(64)
    try:
        text = getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # as in files of other kinds whose first bytes are letters
        raise ValueError(f"{path} is no text in UTF-8: convert it to JSONL first.")


def line_index(path: Path, *, array: bool = False) -> NDArray[np.int64]:
    """Byte offset and line number, from 1, of each row of the file, [rows, 2].

    That of a large file is kept, and memory-mapped where it is of this version of the file.
    """
    before = version(path)
    kept_at = places(path, suffix=".index") if before[0] >= _WORTH_KEEPING else []
    for place in filter(Path.is_file, kept_at):
        try:
            return _mapped(place, before)
        except ValueError as error:
            LOG.warning("%s %s: it is made again from %s.", place, error, path)
    found = scan_array(path) if array else scan_lines(path)
    index = np.fromiter(chain.from_iterable(found), dtype=np.int64).reshape(-1, 2)
    if version(path) != before:
        raise ValueError(f"{path} changed while it was read: wait until it is written whole.")
    with suppress(OSError, ValueError):
        return _mapped(keep(kept_at, lambda place: _keep(index, place, before), ""), before)
    return index


def scan_lines(path: Path) -> Iterator[tuple[int, int]]:
    """Byte offset and line number, from 1, of each line that is not blank; reads the file once."""
    start = end = 0
    line, blank = 1, True
    with path.open("rb", buffering=2**20) as file:
        while piece := file.readline(_PIECE):
            if blank and not piece.isspace():
                yield start, line
                blank = False
            end += len(piece)
            if piece.endswith(b"\n"):
                start, line, blank = end, line + 1, True


def is_array(path: Path) -> bool:
    """Whether the file begins with a bracket and an object; a line ``[1]`` is one bad row."""
    with path.open("rb") as file:
        return _BEGINNING.match(file.read(_HEAD)) is not None


def scan_array(path: Path) -> Iterator[tuple[int, int]]:
    """Byte offset and line number, from 1, of each element; ValueError for no array of objects."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
        counted, line = 0, 1

        def expected(what: str, *characters: bytes) -> bytes:
            """The character here, of these."""
            nonlocal counted, line
            line += sum(1 for _ in _NEWLINE.finditer(text, counted, at))
            counted = at
            if text[at : at + 1] not in characters:
                raise _no_array(path, line, what)
            return text[at : at + 1]

        beginning = _BEGINNING.match(text)
        assert beginning is not None, "is_array has looked"
        at = beginning.end()
        while expected("expected an object or the end ]", b"{", b"]") == b"{":
            yield at, line
            end = _object_end(text, at)
            if end is None:
                raise _no_array(path, line, "an object that does not end")
            at = _behind_blanks(text, end)
            if expected("expected a comma or the end ]", b",", b"]") == b",":
                at = _behind_blanks(text, at + 1)
        at = _behind_blanks(text, at + 1)
        expected("something behind the array's end", b"")


def _behind_blanks(text: mmap, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None, "it may be empty"
    return found.end()


def _object_end(text: mmap, at: int) -> int | None:
    """Behind the object that begins here; None where the file ends before it does."""
    depth = 0
    while found := _PLAIN.match(text, at):
        bracket, at = text[found.end() : found.end() + 1], found.end() + 1
        if bracket not in (b"{", b"[", b"]", b"}"):  # the file's end, or a string up to there
            break
        depth += 1 if bracket in (b"{", b"[") else -1
        if depth == 0:
            return at
    return None


def _no_array(path: Path, line: int, what: str) -> ValueError:
    return ValueError(
        f"{path}:{line}: {what}. The file begins with [ and {{, so it has to be one JSON array of"
        " rows: mend it, or write one row to a line."
    )


def _mapped(place: Path, made_of: tuple[int, int]) -> NDArray[np.int64]:
    """The index in this file; ValueError with what is wrong with it."""
    damaged = "is cut off, damaged or of another version of LoongPlug"
    try:
        rows = open_memmap(place, mode="r")
    except (OSError, ValueError, SyntaxError, TokenError) as error:  # the last two of its header
        raise ValueError(damaged) from error
    if rows.dtype != np.int64 or rows.shape[1:] != (2,) or not len(rows):
        raise ValueError(damaged)
    if tuple(rows[0]) != made_of:
        raise ValueError("is of what the file was before it changed")
    ascends = np.diff(rows[1:, 0], prepend=-1, append=made_of[0]) > 0  # up to the file's size
    if not ascends.all() or rows.offset + rows.nbytes != place.stat().st_size:
        raise ValueError(damaged)
    return rows[1:]


def _keep(index: NDArray[np.int64], place: Path, made_of: tuple[int, int]) -> None:
    """Put the index in its place at once, behind a row on what it was made of."""
    with put_whole(place) as whole, whole.open("wb") as file:
        np.save(file, np.concatenate([np.array([made_of], dtype=np.int64), index]))
