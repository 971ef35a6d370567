"""Where the lines of a file start, kept in an index file beside it."""

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_WORTH_KEEPING = 4 * 2**20  # bytes; a smaller file is read as quickly as its index is opened
_CHUNK = 16 * 2**20
_NEWLINE = 10
_BLANKS = np.frombuffer(b" \t\n\r\x0b\x0c", dtype=np.uint8)
_VERSION = 1
# The index file: these words of 64 bits, then the offsets, then the line numbers.
_HEADER = ("magic", "version", "size", "modified_ns", "rows")
_MAGIC = int.from_bytes(b"loongidx", "little")


@dataclass(frozen=True)
class LineIndex:
    """Byte offset and number, from 1, of each line of a file that is not blank, [rows] each."""

    offsets: NDArray[np.int64]
    lines: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets)


def line_index(path: Path) -> LineIndex:
    """The file's index, memory-mapped where an index file of this version of the file exists.

    Otherwise the file is read, and the index of a large one is kept: beside the file or, where
    that folder cannot be written, in the user's cache folder. Processes that do so at one time
    each write a file of their own and put it in place at once; all are equal.

    Raises ValueError for a file that is written to meanwhile.
    """
    before = _version(path)
    places = (path.with_name(f"{path.name}.index"), _cache_place(path))
    if before[0] >= _WORTH_KEEPING:
        for place in places:
            if (found := _mapped(place, before)) is not None:
                return found
    index = scan_lines(path)
    if _version(path) != before:
        raise ValueError(f"{path} changed while it was read: wait until it is written whole.")
    if before[0] >= _WORTH_KEEPING:
        for place in places:
            with contextlib.suppress(OSError):
                _keep(index, place, before)
                return _mapped(place, before) or index
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
    if not starts:
        return LineIndex(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    offsets = np.concatenate(starts)
    kept = np.ones(len(offsets), dtype=np.bool_)
    with path.open("rb") as file:
        for row in np.flatnonzero(np.concatenate(doubtful)).tolist():
            file.seek(int(offsets[row]))
            kept[row] = bool(file.readline().strip())
    return LineIndex(offsets[kept], np.flatnonzero(kept) + 1)


def _version(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns


def _cache_place(path: Path) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    return Path(root) / "loongplug" / f"{name}.index"


def _mapped(place: Path, version: tuple[int, int]) -> LineIndex | None:
    """The index in this file, unless it is not there, not whole or of another version."""
    try:
        words = np.memmap(place, dtype=np.int64, mode="r")
    except (OSError, ValueError):  # ValueError: an empty file
        return None
    width = len(_HEADER)
    rows = (len(words) - width) // 2
    if len(words) < width or words[:width].tolist() != _header(version, rows):
        return None
    offsets, lines = words[width : width + rows], words[width + rows :]
    return LineIndex(offsets, lines) if len(offsets) == len(lines) else None


def _header(version: tuple[int, int], rows: int) -> list[int]:
    return [_MAGIC, _VERSION, *version, rows]


def _keep(index: LineIndex, place: Path, version: tuple[int, int]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    header = np.array(_header(version, len(index)), dtype=np.int64)
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with open(handle, "wb") as file:
            for words in (header, index.offsets, index.lines):
                file.write(words.tobytes())
        os.chmod(name, 0o644)  # other users may read the data, so let them read its index
        os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise
