"""The index of lengths that ``loongplug data index`` keeps of a data file, and whether it fits.

With it, packs are planned without reading any row. It is bound to the rows and to all settings
that decide on lengths. Images and videos are not among them: there are too many to look at. So
lengths are compared with those of the samples when these are made.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loongplug.data.blend import Blend, Rows, Source, sources_of
from loongplug.data.energon import EnergonRows
from loongplug.data.fingerprint import processor_digest, source_digest
from loongplug.data.kept_files import places
from loongplug.data.pixel_limits import FOLDERS_LIMITS, PixelLimits
from loongplug.data.processor import MultiTurn
from loongplug.data.row_sizes import RowSizes, read_sizes, write_sizes
from loongplug.data.rows import ANY_ROW, MAX_ROW_MIB, RowAccess
from loongplug.data.template import TrainingPhase


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """What decides how long the samples of given rows and media are."""

    folder: Path  # of tokenizer, template and processors
    training_phase: TrainingPhase
    timestamps: bool  # how the model's family tells the time in videos
    video_fps: float | None = None
    special_tokens_in_text: bool = False
    multi_turn: MultiTurn = "split"
    pixel_limits: PixelLimits = FOLDERS_LIMITS
    access: RowAccess = ANY_ROW

    def made_of(self, source: Source) -> dict[str, Any]:
        """What an index of the source's rows is bound to, as plain data; reads the files."""
        return {
            "rows": source_digest(source),
            "processor": processor_digest(self.folder),
            "settings": {
                "training_phase": self.training_phase,
                "video_timestamps": self.timestamps,
                "video_fps": self.video_fps,
                "special_tokens_in_text": self.special_tokens_in_text,
                "multi_turn": self.multi_turn,
                "max_row_mib": self.access.max_row_mib,
                "confine_media": self.access.confine_media,
                "ignore_keys": self.access.ignored,
                "columns": self.access.names,
                **self.pixel_limits.given(),
            },
        }

    def command(self, source: Source) -> str:
        """The command line that makes the index."""
        values = {
            "tokenizer_model": self.folder,
            "training_phase": self.training_phase,
            "media_root": self.access.media_root,
            "video_fps": self.video_fps,
            **self.pixel_limits.given(),
        }
        if self.access.max_row_mib != MAX_ROW_MIB:
            values["max_row_mib"] = self.access.max_row_mib
        words = ["loongplug", "data", "index", str(path_of(source))]
        for name, value in values.items():
            if value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        words += ["--confine-media"] * self.access.confine_media
        words += ["--ignore-keys", self.access.ignore_keys] if self.access.ignored else []
        words += ["--columns", self.access.columns] if self.access.names else []
        words += ["--special-tokens-in-text"] * self.special_tokens_in_text
        words += ["--multi-turn", "last"] * (self.multi_turn == "last")
        return shlex.join(words)


def sample_lengths(
    rows: Rows, found: Sequence[tuple[Source, RowSizes]], *, seq_length: int
) -> NDArray[np.int32] | None:
    """Tokens of the samples that the rows become, [rows], by what :func:`indexed_sizes` found.

    0 stands for a sample that cannot be used, also for one that is longer than ``seq_length``.
    None, unless each of the files has an index.
    """
    if not found:
        return None
    lengths = by_row(rows, [sizes.tokens for _, sizes in found])
    return np.where(lengths > seq_length, 0, lengths)


def by_row(rows: Rows, values: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Of values by row for each source, those of all rows, [rows]; a blend repeats some."""
    return rows.spread(values) if isinstance(rows, Blend) else values[0]


def indexed_sizes(rows: Rows, settings: LengthSettings) -> list[tuple[Source, RowSizes]]:
    """Each file of the rows with its index; nothing, unless all have one.

    Raises:
        ValueError: an index is damaged, or of other rows or settings; with the command that makes
            it again.
    """
    found = [(source, kept_sizes(source, settings)) for source in sources_of(rows)]
    known = [(source, sizes) for source, sizes in found if sizes is not None]
    return known if len(known) == len(found) else []


def kept_sizes(source: Source, settings: LengthSettings) -> RowSizes | None:
    """The source's index, memory-mapped; None without one. ValueError for one that does not fit."""
    problems = []
    for place in filter(Path.is_file, _places_of(source)):
        try:
            made_of, sizes = read_sizes(place)
            if change := _change(made_of, settings.made_of(source)):
                raise ValueError(f"is of other rows or settings ({change})")
        except ValueError as error:
            problems.append(f"{place} {error}")
        else:
            return sizes
    if not problems:
        return None
    raise ValueError(
        f"{problems[0]}: make it again with `{settings.command(source)}`, or remove it to go on"
        " without an index."
    )


def keep_sizes(source: Source, sizes: RowSizes, *, made_of: Mapping[str, Any]) -> Path:
    """Write the index beside the data or, where that cannot be, into the user's cache folder."""
    refusals = []
    for place in _places_of(source):
        try:
            write_sizes(place, sizes, made_of)
        except OSError as error:
            refusals.append(f"{place.parent}: {error.strerror}")
        else:
            return place
    raise ValueError(
        f"The index of {path_of(source)} cannot be kept anywhere ({'; '.join(refusals)}): make"
        " room, or set XDG_CACHE_HOME to a folder that has some."
    )


def path_of(source: Source) -> Path:
    """The file or folder that was named for the source."""
    return source.folder if isinstance(source, EnergonRows) else source.path


def _places_of(source: Source) -> list[Path]:
    split = f".{source.split}" if isinstance(source, EnergonRows) else ""
    return places(path_of(source).absolute(), suffix=f"{split}.lengths")


def _change(found: Any, expected: Mapping[str, Any]) -> str:
    """The first setting that differs; nothing where none does."""
    before, now = dict(_flat(found)), dict(_flat(expected))
    for name in (*now, *before):
        if before.get(name) != now.get(name):
            return f"{name} was {before.get(name)}, is {now.get(name)}"
    return ""


def _flat(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        yield name, values
        return
    for key, value in values.items():
        yield from _flat(value, f"{name} {key}".strip())
