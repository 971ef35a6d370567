"""What is read of a row, and what is refused."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from loongplug.data.media_files import ConfinedFolder, MediaRoot, RemoteFolder
from loongplug.data.object_store import RemoteFile, is_remote

MAX_ROW_MIB = 64  # --max-row-mib; to tokenize a text takes 200 to 250 times its size in memory


@dataclass(frozen=True, kw_only=True)
class RowAccess:
    """Where the media of rows may lie, and how large a row may be.

    Relative paths in rows start at ``media_root``, by default the folder of the rows' file; with
    ``confine_media``, no medium is opened that lies elsewhere. Of a row above ``max_row_mib`` no
    more is read, and it is refused. ``ignore_keys``, with commas between them, may be anywhere in a
    row without a use. ``columns``, OURS=THEIRS with commas between them, gives our names to keys of
    rows.
    """

    media_root: str | Path | None = None
    confine_media: bool = False
    max_row_mib: int = MAX_ROW_MIB
    ignore_keys: str = ""
    columns: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """That of a command line's options."""
        return cls(**{each.name: given[each.name] for each in fields(cls)})

    @property
    def ignored(self) -> list[str]:
        """The keys of ``ignore_keys``, in one order."""
        return sorted({key.strip() for key in self.ignore_keys.split(",")} - {""})

    @cached_property
    def names(self) -> dict[str, str]:
        """Our keys by those of the rows, as ``columns`` says; ValueError where it says no such."""
        found: dict[str, str] = {}
        for pair in filter(str.strip, self.columns.split(",")):
            ours, _, theirs = map(str.strip, pair.partition("="))
            if not ours or not theirs or theirs in found:
                raise ValueError(
                    f"--columns {self.columns}: {pair!r} where OURS=THEIRS was expected, each of"
                    " theirs once, as in query=question,response=answer."
                )
            found[theirs] = ours
        return found

    def by_our_keys(self, row: dict[str, Any], *, where: str) -> dict[str, Any]:
        """The row by our keys; ValueError where two would be one."""
        if not self.names:
            return row
        pairs = [(self.names.get(key, key), each) for key, each in row.items() if each is not None]
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError(
                f"{where}: --columns {self.columns} gives one name to two keys of the row: drop one"
                " of them from the row, or from --columns."
            )
        return found

    def media_of(self, file: Path | RemoteFile) -> MediaRoot:
        """What relative paths in the rows of this file start at."""
        folder = file.parent if self.media_root is None else self.media_root
        if is_remote(folder):
            return RemoteFolder(str(folder), confined=self.confine_media)
        folder = Path(folder)
        return ConfinedFolder(folder) if self.confine_media else folder

    def require_size(self, size: int, *, where: str) -> None:
        """ValueError for a row of more bytes than a row may have."""
        if size > self.max_row_mib * 2**20:
            raise ValueError(
                f"{where}: the row has {size / 2**20:.1f} MiB, but --max-row-mib is"
                f" {self.max_row_mib}: split or drop the row, or raise the limit."
            )


ANY_ROW = RowAccess()  # with the usual bound on its size


class _DuplicateKeyError(ValueError):
    """An object has a key twice; parsers differ in which of the two they take."""


def parse_row_json(content: bytes) -> Any:
    """What the JSON says; ValueError, without a place, for what is none or has a key twice."""
    try:
        return json.loads(content, object_pairs_hook=_unique)
    except _DuplicateKeyError:
        raise
    except RecursionError as error:
        raise ValueError("not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:  # also bytes that are no UTF-8
        raise ValueError(f"not JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise _DuplicateKeyError(
            f"an object of the row has the key {json.dumps(twice)[:80]} twice: leave one of them"
        )
    return found
