"""Tokens and grids of media of each row of a data file, in a file that is memory-mapped."""

import json
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from loongplug.data.positions import Grid
from loongplug.data.remarks import MASKED, Remark, Remarks
from loongplug.output_files import put_whole

# The file: these words of 64 bits, the note as JSON, then the arrays of numbers of 32 bits. The
# checksum is that of all behind the header.
_HEADER = ("magic", "version", "rows", "media", "note_bytes", "checksum")
_HEADER_BYTES = 8 * len(_HEADER)
_MAGIC = int.from_bytes(b"loonglen", "little")
_VERSION = 2


@dataclass(frozen=True)
class RowSizes:
    """How large the samples are that rows become."""

    tokens: NDArray[np.int32]  # [rows]; 0: the row cannot be used
    media: NDArray[np.int32]  # [rows]: how many media each has
    answers: NDArray[np.int32]  # [rows]: how many are trained on
    grids: NDArray[np.int32]  # [media of all rows, 3], in the order of the rows
    remarks: Remarks  # where the first stands is the row's number

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Sequence[Grid], int, Sequence[Remark]]]) -> Self:
        """Of each row's tokens, grids, answers and remarks, taken one after the other."""
        tokens, media, answers, grids = array("i"), array("i"), array("i"), array("i")
        remarks = Remarks()
        for length, each, count, said in rows:
            remarks.add(said, where=str(len(tokens)))
            tokens.append(length)
            answers.append(count)
            media.append(len(each))
            for grid in each:
                grids.extend(grid)
        return cls(
            np.array(tokens, dtype=np.int32),
            np.array(media, dtype=np.int32),
            np.array(answers, dtype=np.int32),
            np.array(grids, dtype=np.int32).reshape(-1, 3),
            remarks,
        )

    def unusable(self, seq_length: float) -> int:
        """How many rows are bad or longer than ``seq_length``, but for those left out."""
        masked, _ = self.remarks.found.get(MASKED, (0, ""))
        return int(((self.tokens == 0) | (self.tokens > seq_length)).sum()) - masked


def write_sizes(place: Path, sizes: RowSizes, note: Mapping[str, Any]) -> None:
    """Put the file in its place at once, with a ``note`` on what it was made of, as plain data."""
    text = json.dumps([note, list(sizes.remarks.found.items())]).encode()
    text += b" " * (-len(text) % 8)
    arrays = (sizes.tokens, sizes.media, sizes.answers, sizes.grids)
    content = b"".join((text, *(each.tobytes() for each in arrays)))
    rows, media = len(sizes.tokens), len(sizes.grids)
    header = (_MAGIC, _VERSION, rows, media, len(text), zlib.crc32(content))
    assert len(header) == len(_HEADER)
    with put_whole(place) as whole:
        whole.write_bytes(np.array(header, dtype=np.int64).tobytes() + content)


def read_sizes(place: Path) -> tuple[Any, RowSizes]:
    """The note and the sizes, memory-mapped; ValueError with what is wrong with the file."""
    try:
        content = np.memmap(place, dtype=np.uint8, mode="r")
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    except ValueError as error:  # of an empty file
        raise ValueError("is cut off") from error
    if len(content) < _HEADER_BYTES:
        raise ValueError("is cut off")
    magic, version, rows, media, note_bytes, checksum = (
        content[:_HEADER_BYTES].view(np.int64).tolist()
    )
    if magic != _MAGIC:
        raise ValueError("is not an index of lengths")
    if version != _VERSION:
        raise ValueError("is of another version of LoongPlug")
    numbers = _HEADER_BYTES + note_bytes
    counts = (rows, rows, rows, 3 * media)
    if min(rows, media, note_bytes) < 0 or len(content) != numbers + 4 * sum(counts):
        raise ValueError("is cut off")
    if checksum != zlib.crc32(content[_HEADER_BYTES:]):
        raise ValueError("is damaged")
    try:
        note, found = json.loads(content[_HEADER_BYTES:numbers].tobytes())
        remarks = Remarks()
        for (kind, name), (count, row) in found:
            remarks.add([(kind, name)], where=row, rows=count)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError("is damaged") from error
    tokens, of_rows, answers, grids, _ = np.split(
        content[numbers:].view(np.int32), np.cumsum(counts)
    )
    return note, RowSizes(tokens, of_rows, answers, grids.reshape(-1, 3), remarks)
