"""Options on data that commands share: sizes of images and videos, and what is read of rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

# What stands behind what is transparent: white, as where models are served, or the colours that the
# file hides there, as in transformers before 5.24.
Transparency = Literal["white", "drop"]
TRANSPARENCIES: tuple[Transparency, ...] = get_args(Transparency)
MAX_ROW_MIB = 64  # --max-row-mib; to tokenize a text takes 200 to 250 times its size in memory


class _Options:
    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        return cls(**{name: given[name] for name in cls.__annotations__})


@dataclass(frozen=True, kw_only=True)
class PixelLimits(_Options):
    """The least and the most pixels of an image, and of a video; None: as the folder says."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None

    def given(self) -> dict[str, int]:
        """The limits that are given, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def limit(self, transform: Any, prefix: str = "", *, patch: int) -> None:
        """Give a processor of transformers the limits of images or of videos (``video_``)."""
        names = tuple(f"{prefix}{side}_pixels" for side in ("min", "max"))
        given, size = self.given(), transform.size
        if given.keys().isdisjoint(names):
            return
        edges = zip(("shortest_edge", "longest_edge"), names, strict=True)
        limits = {edge: given[name] if name in given else size[edge] for edge, name in edges}
        lower, upper = limits.values()
        if lower < 1 or upper < max(lower, patch):
            least, most = (f"--{name.replace('_', '-')}" for name in names)
            raise ValueError(
                f"{least} is {lower} and {most} {upper} (where one is not"
                " given, as the model's folder says): expected 1 or more, the second not below"
                f" the first, and not below {patch}, which is one visual token."
            )
        transform.size = limits


FOLDERS_LIMITS = PixelLimits()


@dataclass(frozen=True, kw_only=True)
class RowAccess(_Options):
    """Where the media of rows may lie, and how large a row may be, by a command's options.

    ``ignore_keys`` and ``columns`` (OURS=THEIRS) have commas in them.
    """

    media_root: str | Path | None = None
    confine_media: bool = False
    max_row_mib: int = MAX_ROW_MIB
    ignore_keys: str = ""
    columns: str = ""

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

    def require_size(self, size: int, *, where: str) -> None:
        """ValueError for a row of more bytes than a row may have."""
        if size > self.max_row_mib * 2**20:
            raise ValueError(
                f"{where}: the row has {size / 2**20:.1f} MiB, but --max-row-mib is"
                f" {self.max_row_mib}: split or drop the row, or raise the limit."
            )


ANY_ROW = RowAccess()  # with the usual bound on its size
