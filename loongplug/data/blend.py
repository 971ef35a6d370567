"""Several files as one: a fixed mixture of their rows by weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loongplug.data.arrow_rows import ArrowRows, is_arrow
from loongplug.data.data_options import ANY_ROW, RowAccess
from loongplug.data.energon import EnergonRows, is_energon
from loongplug.data.media_files import MediaRoot
from loongplug.data.object_store import RemoteFile, data_copy, file_named
from loongplug.data.row_files import JsonlIndex
from loongplug.data.sample import told
from loongplug.data.schemas import ROW_KEYS

Source = JsonlIndex | EnergonRows | ArrowRows
_MOST_ROWS = 2**28  # of a mixture by weights, whose order takes some 3 GB then


@dataclass(frozen=True)
class BlendSpec:
    """Files and, where they were given, their weights."""

    paths: tuple[Path | RemoteFile, ...]
    weights: tuple[float, ...] | None


def parse_blend(values: Sequence[str], *, flag: str) -> BlendSpec:
    """A data flag's values as Megatron writes them, p1 p2 or w1 p1 w2 p2; ValueError for others."""
    numbers = [_number(value) for value in values]
    if all(number is None for number in numbers):
        return BlendSpec(tuple(map(file_named, values)), None)
    weights, names = numbers[::2], values[1::2]
    if len(values) % 2 or None in weights or any(n is not None for n in numbers[1::2]):
        raise ValueError(
            f"{flag} {' '.join(values)}: expected files (p1 p2), or a weight before each of them"
            " (w1 p1 w2 p2)."
        )
    checked = tuple(weight for weight in weights if weight is not None)
    for weight in checked:
        if not 0 < weight < math.inf:
            raise ValueError(
                f"{flag}: weight {weight:g} is not above 0: leave its file out, or raise it."
            )
    return BlendSpec(tuple(map(file_named, names)), checked)


def _number(value: str) -> float | None:
    """The value as a weight; a file whose name is a number is a file."""
    if Path(value).is_file():
        return None
    try:
        return float(value)
    except ValueError:
        return None


def open_rows(
    values: Sequence[str],
    *,
    flag: str,
    seed: int,
    split: str | None = None,
    access: RowAccess = ANY_ROW,
    valid_share: float | None = None,
    valid: bool = False,
) -> "Rows":
    """The rows that a data flag's values name; ValueError for what is missing or malformed.

    With ``valid_share``, this share of each file's rows, each once, if ``valid``; else the others.
    """
    spec = parse_blend(values, flag=flag)
    sources = [open_source(path, split=split, access=access) for path in spec.paths]
    if len(sources) == 1 and valid_share is None:
        return sources[0]
    with told(f"{flag} {' '.join(values)}: "):
        rows = None
        if valid_share is not None:
            rows = _divided(sources, valid_share, valid=valid, seed=seed)
        return Blend(sources, weights=None if valid else spec.weights, seed=seed, rows=rows)


def open_source(path: Path | RemoteFile, *, access: RowAccess, split: str | None = None) -> Source:
    """The rows of a JSONL or Parquet file, or of a folder: Parquet, saved dataset, or energon's."""
    if unknown := set(access.names.values()) - ROW_KEYS:
        raise ValueError(
            f"--columns {access.columns}: {min(unknown)} is no key of ours: expected OURS=THEIRS"
            f" with one of {', '.join(sorted(ROW_KEYS))}."
        )
    if isinstance(path, RemoteFile):
        copy = data_copy(path)
        try:
            kind = ArrowRows if is_arrow(copy) else JsonlIndex
            return kind(copy, access=access, copy_of=path)
        except ValueError as error:
            raise ValueError(str(error).replace(str(copy), str(path))) from error
    if is_energon(path):
        return EnergonRows(path, split=split, access=access)
    if is_arrow(path):
        return ArrowRows(path, access=access)
    if path.is_dir():
        raise ValueError(
            f"Folder {path} has no data: expected Parquet files, a saved dataset, or what energon"
            " prepare writes."
        )
    return JsonlIndex(path, access=access)


class Blend:
    """Rows of several sources in one fixed order, evenly mixed, which takes 10 bytes a row.

    Without weights, each row comes once. With weights, each source has its share, and each row
    comes once at least. ``rows``: those of each source; None: all.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        weights: Sequence[float] | None,
        seed: int,
        rows: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        self.sources = tuple(sources)
        rows = rows or [np.arange(len(source)) for source in sources]
        draws = sizes = [len(of_source) for of_source in rows]
        if weights is not None:
            # Relative to the source that decides the length, whose rows come once.
            pairs = list(zip(sizes, weights, strict=True))
            most, rarest = max(pairs, key=lambda pair: pair[0] / pair[1])
            scale = most / rarest
            if (length := scale * sum(weights)) > _MOST_ROWS:
                raise ValueError(
                    f"weight {rarest:g} is too small: with each of its file's {most} rows once, the"
                    f" mixture would have {length:.3g} rows, and {_MOST_ROWS} are the most. Raise"
                    " it, or leave its file out."
                )
            draws = [max(size, round(weight * scale)) for size, weight in pairs]
        # The k-th of n draws belongs at (k + 1/2) / n of the whole; equal places keep the order
        # of the sources.
        places = np.concatenate([(np.arange(n) + 0.5) / n for n in draws])
        order = np.argsort(places, kind="stable")
        of_source = np.repeat(np.arange(len(draws), dtype=np.uint16), draws)
        drawn = [
            of_source[_drawn(len(of_source), n, seed=seed, source=source)]
            for source, (of_source, n) in enumerate(zip(rows, draws, strict=True))
        ]
        self._row = np.concatenate(drawn)[order]  # [rows]
        self._source = of_source[order]  # [rows]

    def __len__(self) -> int:
        return len(self._row)

    @property
    def access(self) -> RowAccess:
        return self.sources[0].access

    def read(self, index: int) -> dict[str, Any]:
        """The row; ValueError with its place when it is not a JSON object."""
        source, row = self.find(index)
        return self.sources[source].read(row)

    def where(self, index: int) -> str:
        source, row = self.find(index)
        return self.sources[source].where(row)

    def media_root(self, index: int) -> MediaRoot:
        source, row = self.find(index)
        return self.sources[source].media_root(row)

    def spread(self, values: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
        """Of values by row for each source, those of the blend's rows, [rows]."""
        found = np.zeros(len(self), dtype=np.int32)
        for number, of_source in enumerate(values):
            here = self._source == number
            found[here] = of_source[self._row[here]]
        return found

    def find(self, index: int) -> tuple[int, int]:
        """The number of a row's source, and of the row there."""
        return int(self._source[index]), int(self._row[index])


Rows = Source | Blend


def sources_of(rows: Rows) -> tuple[Source, ...]:
    return rows.sources if isinstance(rows, Blend) else (rows,)


def _divided(
    sources: Sequence[Source], share: float, *, valid: bool, seed: int
) -> list[NDArray[np.int64]]:
    """The numbers of each source's rows that are held out, if ``valid``, or of the others."""
    # The n-th number is the same however many are drawn, and in any version of numpy.
    drawn = [np.random.RandomState([seed, 0, 1]).random_sample(len(each)) for each in sources]
    found = [np.flatnonzero((each < share) == valid) for each in drawn]
    if not (any if valid else all)(map(len, found)):
        what = "takes no row" if valid else "leaves no row to train on"
        sizes = " + ".join(str(len(each)) for each in sources)
        raise ValueError(f"--valid-share {share:g} {what} of {sizes}: give another share.")
    return found


def _drawn(size: int, draws: int, *, seed: int, source: int) -> NDArray[np.int64]:
    """Which of a source's rows come, [draws]: all of them as often as fits, then some."""
    whole, rest = divmod(draws, max(size, 1))
    # RandomState's numbers are promised never to change: a resumed run sees the same blend.
    some = np.random.RandomState([seed, source]).permutation(size)[:rest]
    return np.append(np.tile(np.arange(size), whole), np.sort(some))
