"""Where the rows of a file start, kept in an index file beside it.

Of a file that is one JSON array, as LLaVA publishes its data, brackets and strings alone are read.
Rows are parsed when they are used, so that a bad one is one bad row.
"""

import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loongplug.data.kept_files import LOG, places, version
from loongplug.output_files import put_whole

_WORTH_KEEPING = 4 * 2**20  # bytes; a smaller file is read as quickly as its index is opened
_PIECE = 16 * 2**20  # bytes of a line that are held at a time
_VERSION = 4
# The index file: these words of 64 bits, then those of the index. The checksum is theirs.
_HEADER = ("magic", "version", "size", "modified_ns", "rows", "checksum")
_MAGIC = int.from_bytes(b"loongidx", "little")
_HEAD = 2**16  # bytes; more blanks than that are in front of no array
_BLANKS = re.compile(rb"[ \t\n\r]*+")
# Up to the first row or the end, behind UTF-8's byte order mark.
_BEGINNING = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\n\r]*+\[[ \t\n\r]*+(?=[{\]])")
# What changes no depth: anything but brackets, and whole strings.
_PLAIN = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_NEWLINE = re.compile(rb"\n")


def line_index(path: Path, *, array: bool = False) -> NDArray[np.int64]:
    """Byte offset and line number, from 1, of each row of the file, [rows, 2].

    A row is a line that is not blank; with ``array``, the file is one JSON array, and its elements
    are the rows. Memory-mapped where an index file of this version of the file exists. Without one
    the file is read, and the index of a large one is kept: beside the file or, where that folder
    cannot be written, in the user's cache folder. An index file that is damaged or of other data is
    made again. Raises ValueError for a file that is written to meanwhile.
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
    for place in kept_at:
        with suppress(OSError, ValueError):
            _keep(index, place, before)
            return _mapped(place, before)
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
    try:
        words = np.memmap(place, dtype=np.int64, mode="r")
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    except ValueError as error:  # of an empty file, or one of no whole words
        raise ValueError("is cut off") from error
    header, index = words[: len(_HEADER)].tolist(), words[len(_HEADER) :]
    if header[:1] != [_MAGIC]:
        raise ValueError("is not an index of lines")
    if len(header) < len(_HEADER) or header[1] != _VERSION:
        raise ValueError("is cut off or of another version of LoongPlug")
    if tuple(header[2:4]) != made_of:
        raise ValueError("is of what the file was before it changed")
    rows, checksum = header[4:]
    if len(index) != 2 * rows:
        raise ValueError("is cut off")
    if checksum != zlib.crc32(index):
        raise ValueError("is damaged")
    return index.reshape(-1, 2)


def _keep(index: NDArray[np.int64], place: Path, made_of: tuple[int, int]) -> None:
    words = (_MAGIC, _VERSION, *made_of, len(index), zlib.crc32(index))
    assert len(words) == len(_HEADER)
    with put_whole(place) as whole, whole.open("wb") as file:
        file.write(np.array(words, dtype=np.int64).tobytes())
        file.write(index.data)
