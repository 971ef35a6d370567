"""The index of extents that is kept of a data file, and whether it fits.

It is bound to the rows and to all settings that decide on extents, not to media: there are too many
to look at, so what is loaded is compared with the index.
"""

import hashlib
import json
import shlex
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from loongplug.data.bad_samples import Remarks
from loongplug.data.blend import Blend, Rows, Source, sources_of
from loongplug.data.cache_folder import keep, places
from loongplug.data.energon import EnergonRows
from loongplug.data.fingerprint import processor_digest, source_digest
from loongplug.data.sample import MASKED, MEDIA_KINDS, MediaRun, MediumExtent, Remark, RowExtent
from loongplug.data.survey_settings import SurveySettings
from loongplug.output_files import put_whole

_VERSION = "3"
_ANY = "any"  # no row's turns differ, whatever --multi-turn says of them
_LAST = ".last"  # in the name of an index of that rule


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
        """The table of each row's extent and the remarks on it, taken one after the other."""
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
                "kinds": [MEDIA_KINDS.index(each.kind) for each in row.media],
                "grids": chain(*(each.grid for each in row.media)),
                "details": chain(*((*x.detail, -1, -1, -1, -1, -1)[:5] for x in row.media)),
                "runs": chain(*row.runs),
            }.items():
                values[name].extend(found)
        arrays = {name: _shaped(np.asarray(each), name) for name, each in values.items()}
        return cls(**arrays | {"ends": arrays["ends"].cumsum(axis=0)}, remarks=remarks)

    def row(self, number: int) -> RowExtent:
        begins = self.ends[number - 1] if number else (0, 0, 0)
        renderings, media, runs = map(slice, begins, self.ends[number])
        kinds, grids = self.kinds[media].tolist(), self.grids[media].tolist()
        pairs = self.renderings[renderings].tolist()
        return RowExtent(
            lengths=tuple(tokens for tokens, _ in pairs),
            shown=tuple(shown for _, shown in pairs),
            media=tuple(
                MediumExtent(
                    MEDIA_KINDS[kind], (time, height, width), tuple(x for x in said if x >= 0)
                )
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


@dataclass(frozen=True)
class IndexedExtents:
    """The extents of all rows, by the index of each of their files."""

    rows: Rows
    tables: tuple[ExtentTable, ...]  # of each source

    @classmethod
    def of(cls, rows: Rows, settings: SurveySettings) -> Self | None:
        """The index of each file, None where one has none; ValueError as of :func:`kept_table`."""
        found = [kept_table(source, settings) for source in sources_of(rows)]
        tables = tuple(table for table in found if table is not None)
        return cls(rows, tables) if len(tables) == len(found) else None

    def row(self, index: int) -> RowExtent:
        if not isinstance(self.rows, Blend):
            return self.tables[0].row(index)
        source, row = self.rows.find(index)
        return self.tables[source].row(row)

    def lengths(self, *, seq_length: int) -> NDArray[np.int32]:
        """Tokens of each row's sample, [rows]; 0: it cannot be used, or is too long."""
        tokens = self.by_row("tokens")
        return np.where(tokens > seq_length, 0, tokens)

    def by_row(self, name: str) -> NDArray[np.int32]:
        """The values of so named an array of the tables, [rows]; a blend repeats some."""
        values = [getattr(table, name) for table in self.tables]
        return self.rows.spread(values) if isinstance(self.rows, Blend) else values[0]


def made_of(source: Source, settings: SurveySettings) -> dict[str, Any]:
    """What an index of the source's rows is bound to, as plain data; reads the files."""
    access = settings.access
    options = {**settings.options, "ignore_keys": access.ignored, "columns": access.names}
    return {
        "rows": source_digest(source),
        "processor": processor_digest(settings.folder),
        "settings": {**options, "video_timestamps": settings.timestamps},
    }


def command_for(source: Source, settings: SurveySettings) -> str:
    options = {
        "tokenizer_model": settings.folder,
        **settings.options,
        "media_root": settings.access.media_root,
        "index_dir": settings.index_dir,
    }
    words = ["loongplug", "data", "index", str(path_of(source))]
    for name, value in options.items():
        if value not in (None, False, ""):
            words += [f"--{name.replace('_', '-')}", *[str(value)] * (value is not True)]
    return shlex.join(words)


def kept_table(source: Source, settings: SurveySettings) -> ExtentTable | None:
    """The source's index, memory-mapped; None without one.

    One that somebody asked for comes first. It is refused by a ValueError, with the command that
    makes it again, where it is damaged, or of other rows or settings, and no other fits.
    """
    expected, problems = made_of(source, settings), []
    rules = [*([_LAST] if settings.multi_turn == "last" else []), ""]
    for mark in ("", _digest(expected)):
        places = [place for rule in rules for place in _places_of(source, settings, mark + rule)]
        for place in filter(Path.is_file, places):
            try:
                known, table = ExtentTable.read(place)
                if known["settings"]["multi_turn"] == _ANY:
                    known["settings"]["multi_turn"] = settings.multi_turn
                if change := _change(known, expected):
                    raise ValueError(f"is of other rows or settings ({change})")
            except ValueError as error:
                problems += [] if mark else [f"{place} {error}"]
            else:
                return table
    if not problems:
        return None
    raise ValueError(
        f"{problems[0]}: make it again with `{command_for(source, settings)}`, or remove it to go"
        " on without an index."
    )


def keep_table(
    source: Source,
    table: ExtentTable,
    settings: SurveySettings,
    *,
    known: dict[str, Any],
    turns_differ: bool,
    asked: bool,
) -> Path:
    """Write the index, of what is ``known`` of the source, in the first place that takes it.

    One that nobody ``asked`` for has a digest of its settings in its name, and replaces no other.
    """
    name = "" if asked else _digest(known)
    known = {**known, "settings": {**known["settings"]}}
    if not turns_differ:
        known["settings"]["multi_turn"] = _ANY
    name += _LAST if known["settings"]["multi_turn"] == "last" else ""
    what = f"The index of {path_of(source)}"
    return keep(_places_of(source, settings, name), lambda place: table.write(place, known), what)


def _digest(known: Mapping[str, Any]) -> str:
    """A digest of what an index is bound to but for rows and the rule on turns, for its name."""
    bound = known["processor"], {**known["settings"], "multi_turn": None}
    return f".{hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()[:8]}"


def path_of(source: Source) -> Path:
    """The file or folder that was named for the source."""
    return source.folder if isinstance(source, EnergonRows) else source.path


def _places_of(source: Source, settings: SurveySettings, name: str) -> list[Path]:
    split = f".{source.split or 'all'}" if isinstance(source, EnergonRows) else ""
    beside, cached = places(path_of(source).absolute(), suffix=f"{split}{name}.lengths")
    folder = settings.index_dir
    # With a digest of the path: files of one name may lie in several folders.
    return [beside, cached] if folder is None else [folder / f"{cached.name[:8]}-{beside.name}"]


def _change(found: Any, expected: Mapping[str, Mapping[str, Any]]) -> str:
    """The first setting that differs; nothing where none does."""
    for part, now in expected.items():
        before = found.get(part, {})
        for name in {**now, **before}:
            if before.get(name) != now.get(name):
                return f"{part} {name} was {before.get(name)}, is {now.get(name)}"
    return ""
