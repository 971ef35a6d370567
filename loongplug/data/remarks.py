"""Remarks on rows that are no faults: keys without a use, media's marks as text, rows left out."""

from collections.abc import Iterable
from itertools import islice

Remark = tuple[str, str]  # its kind (key, mark, masked), and the key or the mark
MASKED: Remark = ("masked", "")  # the row's own loss or weight leaves it out
_MOST = 1000  # remarks that are counted apart: hostile rows may have a new key each
_MOST_KEYS = 20  # in one line


class Remarks:
    """On how many rows each remark is, and where the first of them stands."""

    def __init__(self, *, literal_markers: bool = False) -> None:
        """``literal_markers``: marks of media that are text are meant, and no remark."""
        self.found: dict[Remark, tuple[int, str]] = {}
        self._literal = literal_markers
        self._told = 0

    def add(self, remarks: Iterable[Remark], *, where: str, rows: int = 1) -> None:
        """Count the remarks on a row, or on so many, the first of which stands at ``where``."""
        for remark in remarks:
            known = remark if remark in self.found or len(self.found) < _MOST else ("key", "...")
            if remark[0] != "mark" or not self._literal:
                count, first = self.found.get(known, (0, where))
                self.found[known] = count + rows, first

    def news(self) -> list[str]:
        """Lines on what was not told yet: on all keys, on each mark, on rows left out."""
        new = list(islice(self.found.items(), self._told, None))
        self._told = len(self.found)
        keys = [f"{name!r:.60} ({rows})" for (kind, name), (rows, _) in new if kind == "key"]
        keys[_MOST_KEYS:] = [f"{len(keys) - _MOST_KEYS} others"] * (len(keys) > _MOST_KEYS)
        lines = [f"keys without a use (rows that have them): {', '.join(keys)}"] if keys else []
        for (kind, name), (rows, where) in new:
            if kind == "mark":
                lines.append(
                    f"{name} as text in {rows} rows, the first at {where}: no medium takes its"
                    " place. Give the rows their media, or --literal-markers if text is meant"
                )
            elif kind == "masked":
                lines.append(f"{rows} rows left out by loss or weight, the first at {where}")
        return lines
