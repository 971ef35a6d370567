"""Bad samples and odd rows in training: what becomes of them, and how many there are."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Literal, get_args

from loongplug.data.sample import BadSample, BadSampleError, OddVideos, Remark

BadSamplePolicy = Literal["skip", "fatal"]
BAD_SAMPLE_POLICIES: tuple[BadSamplePolicy, ...] = get_args(BadSamplePolicy)
_LOG = logging.getLogger(__name__)
_MOST = 1000  # keys that are counted apart: hostile rows may have a new one each
_MOST_KEYS = 20  # in one line


class Remarks:
    """On how many rows each remark is, and where the first of them stands."""

    def __init__(self, *, literal_markers: bool = False, indexed: bool = False) -> None:
        """``literal_markers``: marks as text are meant; ``indexed``: an index has told of rows."""
        self.found: dict[Remark, tuple[int, str]] = {}
        self._silent = ("mark",) * literal_markers + ("key", "mark", "masked") * indexed
        self._told = 0

    def add(self, remarks: Iterable[Remark], *, where: str, rows: int = 1) -> None:
        """Count the remarks on a row, or on so many, the first of which stands at ``where``."""
        for remark in remarks:
            many = remark[0] == "key" and len(self.found) >= _MOST and remark not in self.found
            known = ("key", "...") if many else remark
            if remark[0] not in self._silent:
                count, first = self.found.get(known, (0, where))
                self.found[known] = count + rows, first

    def news(self) -> list[str]:
        """Lines on keys and marks that were new since the last call; more rows may have them."""
        new = list(islice(self.found.items(), self._told, None))
        self._told = len(self.found)
        return _lines({each: (0, where) for each, (_, where) in new if each[0] in ("key", "mark")})

    def totals(self) -> list[str]:
        """Lines on all: on keys, on each mark, on rows left out, on each kind of odd videos."""
        return _lines(self.found)


def _lines(found: Mapping[Remark, tuple[int, str]]) -> list[str]:
    lines, keys = [], {name: told for (kind, name), told in found.items() if kind == "key"}
    if keys:
        names = [f"{name!r:.60}" + f" ({rows})" * (rows > 0) for name, (rows, _) in keys.items()]
        names[_MOST_KEYS:] = [f"{len(keys) - _MOST_KEYS} others"] * (len(keys) > _MOST_KEYS)
        rows, where = next(iter(keys.values()))
        head = "rows that have them" if rows else f"the first at {where}"
        lines.append(f"keys without a use ({head}): {', '.join(names)}")
    for (kind, name), (rows, where) in found.items():
        first = f" in {rows} rows" * (rows > 0) + f", the first at {where}"
        if kind == "mark":
            lines.append(
                f"{name} as text{first}: no medium takes its place."
                " Give the rows their media, or --literal-markers if text is meant"
            )
        elif kind == "masked":
            lines.append(f"{rows} rows left out by loss or weight, the first at {where}")
        elif kind == "video":
            lines.append(f"videos with {name}, decoded {rows} times, the first: {where}")
    return lines


class BadSamples:
    """What training does with the bad samples that this rank meets, and how many it met."""

    def __init__(self, policy: BadSamplePolicy = "fatal", remarks: Remarks | None = None) -> None:
        self.skips = policy == "skip"
        self.speaks = True
        self.counts: Counter[str] = Counter()
        self.media: Counter[str] = Counter()  # by encoder, those that this rank has loaded
        self.remarks = remarks or Remarks()  # on samples that are used

    def meet(self, sample: BadSample) -> None:
        """Count and log a sample that is to be left out; BadSampleError where none may be."""
        masked = sample.kind == "masked"
        if not self.skips and not masked:
            raise BadSampleError(sample)
        self.counts[sample.kind] += 1
        if (self.speaks and not masked) or sample.kind == "pixels":
            _LOG.warning("bad sample left out (%s): %s", sample.kind, sample.message)

    def used(self, odd: OddVideos) -> None:
        """Count odd videos that this rank has decoded; logs the first of each kind."""
        for kind, message in odd:
            if ("video", kind) not in self.remarks.found:
                _LOG.warning(message)
            self.remarks.add([("video", kind)], where=message)
