"""A row of tokens cut into segments that do not see each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a row. A token sees itself and what is before it in its own segment.

    ``bounds`` are the places where segments begin and end, int64 [segments + 1], ascending from 0
    to the row's length.
    """

    bounds: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: Sequence[int], *, padded_to: int | None = None) -> "Segments":
        """Segments of these ``lengths``; empty ones are left out.

        With ``padded_to`` the row has that many tokens, and those behind the others are one more
        segment.
        """
        tokens = sum(lengths)
        length = tokens if padded_to is None else padded_to
        assert min(lengths, default=0) >= 0, lengths
        assert tokens <= length, (lengths, padded_to)
        ends = np.cumsum([0, *lengths, length - tokens], dtype=np.int64)
        return cls(np.unique(ends))

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return int(self.bounds[-1])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment."""
        return tuple(np.diff(self.bounds).tolist())

    def starts(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the segment of each place begins; same shape as ``places``."""
        return self.bounds[self._indices(places)]

    def pairs_before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many pairs of query and key have their query before each place; same shape.

        Exact, at a cost that does not depend on the row's length. The row's end is a place, too.
        """
        whole = np.diff(self.bounds)
        earlier = np.concatenate(([0], np.cumsum(whole * (whole + 1) // 2)))
        segments = self._indices(places)
        inside = places - self.bounds[segments]
        return earlier[segments] + inside * (inside + 1) // 2

    def _indices(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.bounds, places, side="right") - 1
