"""Where the rows of a file start, kept in an index file beside it."""

import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from loongplug.data.json_array import scan_array
from loongplug.data.kept_files import LOG, places, version
from loongplug.output_files import put_whole

_WORTH_KEEPING = 4 * 2**20  # bytes; a smaller file is read as quickly as its index is opened
_CHUNK = 16 * 2**20
_NEWLINE = 10
_BLANKS = np.frombuffer(b" \t\n\r\x0b\x0c", dtype=np.uint8)
_VERSION = 3
# The index file: these words of 64 bits, then the offsets, then the line numbers. The checksum is
# that of all behind the header.
_HEADER = ("magic", "version", "size", "modified_ns", "rows", "checksum")
_MAGIC = int.from_bytes(b"loongidx", "little")


@dataclass(frozen=True)
class LineIndex:
    """Byte offset and line number, from 1, of each row of a file, [rows] each.

    A row is a line that is not blank or, of a JSON array, an element.
    """

    offsets: NDArray[np.int64]
    lines: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets)


def line_index(path: Path, *, array: bool = False) -> LineIndex:
    """The file's index, memory-mapped where an index file of this version of the file exists.

    Without one the file is read, and the index of a large one is kept: beside the file or, where
    that folder cannot be written, in the user's cache folder. Processes that do so at one time
    each write a file of their own and put it in place at once; all are equal. An index file that
    is damaged or of other data is made again, which is logged in one line.

    ``array``: the file is one JSON array, and its elements are the rows.

    Raises ValueError for a file that is written to meanwhile.
    """
    before = version(path)
    kept_at = places(path, suffix=".index") if before[0] >= _WORTH_KEEPING else []
    for place in kept_at:
        found = _mapped(place, before)
        if isinstance(found, LineIndex):
            return found
        if found is not None:
            LOG.warning("%s %s: it is made again from %s.", place, found, path)
    index = LineIndex(*scan_array(path)) if array else scan_lines(path)
    if version(path) != before:
        raise ValueError(f"{path} changed while it was read: wait until it is written whole.")
    for place in kept_at:
        with suppress(OSError):
            _keep(index, place, before)
            kept = _mapped(place, before)
            return kept if isinstance(kept, LineIndex) else index
    return index


def scan_lines(path: Path) -> LineIndex:
    """Read the file once and note where its lines start; blank ones count, but are no rows."""
    starts: list[NDArray[np.int64]] = []
    doubtful: list[NDArray[np.bool_]] = []  # of each start: whether the line may be blank
    position, at_start = 0, True
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            data = np.frombuffer(chunk, dtype=np.uint8)
            found = np.flatnonzero(data == _NEWLINE) + 1
            if at_start:
                found = np.append(0, found)
            at_start = chunk[-1] == _NEWLINE
            found = found[found < len(data)]
            starts.append(found + position)
            doubtful.append(np.isin(data[found], _BLANKS))
            position += len(data)
    offsets = np.concatenate([np.zeros(0, dtype=np.int64), *starts])
    kept = np.ones(len(offsets), dtype=np.bool_)
    with path.open("rb") as file:
        for row in np.flatnonzero(np.concatenate([kept[:0], *doubtful])).tolist():
            file.seek(int(offsets[row]))
            kept[row] = not _at_blank_line(file)
    return LineIndex(offsets[kept], np.flatnonzero(kept) + 1)


def _at_blank_line(file: BinaryIO) -> bool:
    """Whether nothing but blanks follows up to the line's end, however long it is."""
    while piece := file.readline(_CHUNK):
        if piece.strip() or piece.endswith(b"\n"):
            return not piece.strip()
    return True


def _mapped(place: Path, made_of: tuple[int, int]) -> LineIndex | str | None:
    """The index in this file, what is wrong with the file, or None where there is none."""
    if not place.is_file():
        return None
    try:
        words = np.memmap(place, dtype=np.int64, mode="r")
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError:  # of an empty file, or one of no whole words
        return "is cut off"
    width = len(_HEADER)
    if not len(words) or words[0] != _MAGIC:
        return "is not an index of lines"
    if len(words) < width or words[1] != _VERSION:
        return "is cut off or of another version of LoongPlug"
    if tuple(words[2:4].tolist()) != made_of:
        return "is of what the file was before it changed"
    rows, checksum = words[4:width].tolist()
    if len(words) != width + 2 * rows:
        return "is cut off"
    if checksum != zlib.crc32(memoryview(words[width:]).cast("B")):
        return "is damaged"
    return LineIndex(words[width : width + rows], words[width + rows :])


def _keep(index: LineIndex, place: Path, made_of: tuple[int, int]) -> None:
    checksum = zlib.crc32(index.lines.tobytes(), zlib.crc32(index.offsets.tobytes()))
    words = (_MAGIC, _VERSION, *made_of, len(index), checksum)
    assert len(words) == len(_HEADER)
    header = np.array(words, dtype=np.int64)
    with put_whole(place) as whole, whole.open("wb") as file:
        for part in (header, index.offsets, index.lines):
            file.write(part.tobytes())
