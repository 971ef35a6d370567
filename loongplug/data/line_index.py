"""Where the rows of a file start, kept in an index file beside it."""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loongplug.data.json_array import scan_array
from loongplug.data.kept_files import LOG, places, version
from loongplug.output_files import put_whole

_WORTH_KEEPING = 4 * 2**20  # bytes; a smaller file is read as quickly as its index is opened
_PIECE = 16 * 2**20  # bytes of a line that are held at a time
_VERSION = 4
# The index file: these words of 64 bits, then those of the index. The checksum is theirs.
_HEADER = ("magic", "version", "size", "modified_ns", "rows", "checksum")
_MAGIC = int.from_bytes(b"loongidx", "little")


def line_index(path: Path, *, array: bool = False) -> NDArray[np.int64]:
    """Byte offset and line number, from 1, of each row of the file, [rows, 2].

    A row is a line that is not blank; with ``array``, the file is one JSON array, and its elements
    are the rows. Memory-mapped where an index file of this version of the file exists.

    Without one the file is read, and the index of a large one is kept: beside the file or, where
    that folder cannot be written, in the user's cache folder. Processes that do so at one time
    each write a file of their own and put it in place at once; all are equal. An index file that
    is damaged or of other data is made again, which is logged in one line.

    Raises ValueError for a file that is written to meanwhile.
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
