"""Extents of rows: how large their samples are, where media stand in them; a table of them."""

import json
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from loongplug.data.positions import Grid
from loongplug.data.remarks import MASKED, Remark, Remarks
from loongplug.output_files import put_whole

_KINDS = ("image", "video", "audio")  # a table names a kind by its number
_VERSION = "3"


class MediumExtent(NamedTuple):
    """What is known of a medium without its file.

    ``detail`` is what its header says beside the grid: of a sound its samples; of a video how many
    frames are taken and, of a file, how many there are, how many make a second, height and width.
    """

    kind: str  # as encoders' entries have it
    grid: Grid
    detail: tuple[float, ...] = ()


class MediaRun(NamedTuple):
    """Neighbours in a sample that hold places of media: their token, and which they are."""

    token: int
    begin: int
    length: int


@dataclass(frozen=True, kw_only=True)
class RowExtent:
    """How large the sample is that a row becomes; without tokens, it cannot be used."""

    lengths: tuple[int, ...] = ()  # tokens of each of its renderings, which follow each other
    shown: tuple[int, ...] = ()  # how many of the row's media, from the first on, each has
    media: tuple[MediumExtent, ...] = ()  # of the row
    runs: tuple[MediaRun, ...] = ()
    trained: int = 0  # tokens that count
    answers: int = 0  # that are trained on

    @property
    def tokens(self) -> int:
        """Of all renderings."""
        return sum(self.lengths)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Which of the row's media the sample has, in the order of their tokens."""
        return tuple(chain.from_iterable(map(range, self.shown)))


UNUSABLE = RowExtent()


def runs_of(ids: NDArray[np.int64], tokens: Sequence[int]) -> tuple[MediaRun, ...]:
    """The runs in ``ids`` [n] of tokens that hold places of media."""
    if not len(ids):
        return ()
    begins = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
    ends = np.append(begins[1:], len(ids))
    found = zip(ids[begins].tolist(), begins.tolist(), (ends - begins).tolist(), strict=True)
    return tuple(MediaRun(*each) for each in found if each[0] in tokens)


@dataclass(frozen=True, kw_only=True)
class ExtentTable:
    """The extents of a file's rows in their order; arrays of what rows have lie end to end."""

    tokens: NDArray[np.int32]  # [rows]; 0: the row cannot be used
    trained: NDArray[np.int32]  # [rows]
    answers: NDArray[np.int32]  # [rows]
    ends: NDArray[np.int64]  # [rows, 3]: of its renderings, media and runs in the following
    renderings: NDArray[np.int32]  # [renderings, 2]: tokens, shown
    kinds: NDArray[np.int8]  # [media]
    grids: NDArray[np.int32]  # [media, 3]
    details: NDArray[np.float64]  # [media, 5], filled up with -1
    runs: NDArray[np.int32]  # [runs, 3]
    remarks: Remarks  # where the first stands is the row's number

    @classmethod
    def of(cls, rows: Iterable[tuple[RowExtent, Sequence[Remark]]]) -> Self:
        """Of each row's extent and the remarks on it, taken one after the other."""
        remarks = Remarks()
        values: dict[str, array[Any]] = {name: array(code) for name, (code, _) in _ARRAYS.items()}
        for number, (row, said) in enumerate(rows):
            remarks.add(said, where=str(number))
            for name, found in {
                "tokens": [row.tokens],
                "trained": [row.trained],
                "answers": [row.answers],
                "ends": [len(row.lengths), len(row.media), len(row.runs)],
                "renderings": chain(*zip(row.lengths, row.shown, strict=True)),
                "kinds": [_KINDS.index(each.kind) for each in row.media],
                "grids": chain(*(each.grid for each in row.media)),
                "details": chain(*((*x.detail, -1, -1, -1, -1, -1)[:5] for x in row.media)),
                "runs": chain(*row.runs),
            }.items():
                values[name].extend(found)
        arrays = {name: _shaped(np.asarray(each), name) for name, each in values.items()}
        return cls(**arrays | {"ends": arrays["ends"].cumsum(axis=0)}, remarks=remarks)

    def row(self, number: int) -> RowExtent:
        """The extent of one row."""
        begins = self.ends[number - 1] if number else (0, 0, 0)
        renderings, media, runs = map(slice, begins, self.ends[number])
        kinds, grids = self.kinds[media].tolist(), self.grids[media].tolist()
        pairs = self.renderings[renderings].tolist()
        return RowExtent(
            lengths=tuple(tokens for tokens, _ in pairs),
            shown=tuple(shown for _, shown in pairs),
            media=tuple(
                MediumExtent(_KINDS[kind], (time, height, width), tuple(x for x in said if x >= 0))
                for kind, (time, height, width), said in zip(
                    kinds, grids, self.details[media].tolist(), strict=True
                )
            ),
            runs=tuple(MediaRun(*each) for each in self.runs[runs].tolist()),
            trained=int(self.trained[number]),
            answers=int(self.answers[number]),
        )

    def unusable(self, seq_length: float) -> int:
        """How many rows are bad or longer than ``seq_length``, but for those left out."""
        masked, _ = self.remarks.found.get(MASKED, (0, ""))
        return int(((self.tokens == 0) | (self.tokens > seq_length)).sum()) - masked

    @property
    def digest(self) -> int:
        """Of all arrays."""
        found = 0
        for name in _ARRAYS:
            found = zlib.crc32(np.ascontiguousarray(getattr(self, name)).data, found)
        return found

    def write(self, place: Path, note: Mapping[str, Any]) -> None:
        """Put the file in its place at once, with a ``note`` on what it was made of."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        said = json.dumps([note, list(self.remarks.found.items())])
        with put_whole(place) as whole:
            save_file(arrays, whole, metadata={"loongplug extents": _VERSION, "said": said})

    @classmethod
    def read(cls, place: Path) -> tuple[Any, Self]:
        """The note and the table; ValueError with what is wrong with the file."""
        try:
            with safe_open(place, framework="numpy") as file:  # checks sizes and offsets
                known = file.metadata() or {}
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror or error})") from error
        except SafetensorError as error:
            raise ValueError("is no index of this version of LoongPlug, or cut off") from error
        if known.get("loongplug extents") != _VERSION:
            raise ValueError("is no index of this version of LoongPlug")
        note, found = json.loads(known["said"])
        remarks = Remarks()
        for (kind, name), (count, row) in found:
            remarks.add([(kind, name)], where=row, rows=count)
        return note, cls(**_mapped(place), remarks=remarks)


# The type of each array, by its code, and how many values a row of it has.
_ARRAYS: dict[str, tuple[str, int]] = {
    "tokens": ("i", 1),
    "trained": ("i", 1),
    "answers": ("i", 1),
    "ends": ("q", 3),
    "renderings": ("i", 2),
    "kinds": ("b", 1),
    "grids": ("i", 3),
    "details": ("d", 5),
    "runs": ("i", 3),
}


def _shaped(values: NDArray[Any], name: str) -> NDArray[Any]:
    code, width = _ARRAYS[name]
    return values.view(code).reshape((-1, width) if width > 1 else -1)


def _mapped(place: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file, of which memory holds what is looked at."""
    content = np.memmap(place, dtype=np.uint8, mode="r")
    start = 8 + int(content[:8].view(np.uint64)[0])
    header = json.loads(content[8:start].tobytes())
    spans = {name: slice(*(start + x for x in header[name]["data_offsets"])) for name in _ARRAYS}
    return {name: _shaped(content[span], name) for name, span in spans.items()}
