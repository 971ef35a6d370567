"""A rank's trace on disk: JSON lines. The first names the rank."""

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loongplug.output_files import begins

RANK_TRACE = begins(rb'\{"rank": \d+, "world_size": \d+, "device": "\w+"\}\n|$')
_LOG = logging.getLogger(__name__)
_OWN_KEYS = ("phase", "name", "start", "end", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Something that took from ``start`` to ``end``, in nanoseconds since 1970."""

    phase: str
    name: str
    start: int
    end: int
    step: int | None  # from 1; None outside of steps
    details: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank wrote; ``place`` holds its ranks by kind, such as ``tp``."""

    rank: int
    world_size: int
    device: str
    place: Mapping[str, int]
    events: tuple[TraceEvent, ...]
    cut_off: bool  # the last line is not whole: the rank was killed while it wrote

    def label(self) -> str:
        """The rank with its place, as ``0 tp0 pp0 dp0``."""
        return " ".join([str(self.rank), *(f"{kind}{rank}" for kind, rank in self.place.items())])

    def whole_steps(self) -> set[int]:
        """The steps that ran to their end."""
        return {
            event.step
            for event in self.events
            if event.phase == "step" and event.step is not None and not event.details.get("failed")
        }


def rank_file(folder: Path, rank: int) -> Path:
    """The file that a rank writes."""
    return folder / f"rank_{rank:05d}.jsonl"


class TraceWriter:
    """Writes events to one rank's file, each call's whole, so that a crash keeps what is there.

    Where the disk takes no more, that is said once, and nothing more is written.
    """

    def __init__(self, folder: Path, *, rank: int, world_size: int, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = rank_file(folder, rank).open("w")
        self._full = False
        self._put([{"rank": rank, "world_size": world_size, "device": device}])

    def place(self, place: Mapping[str, int]) -> None:
        """Write where in the layout the rank stands, once that is known."""
        self._put([{"place": dict(place)}])

    def write(self, events: Iterable[TraceEvent]) -> None:
        """Write finished events."""
        self._put(
            {key: getattr(event, key) for key in _OWN_KEYS} | event.details for event in events
        )

    def close(self) -> None:
        """Nothing more comes."""
        with suppress(OSError):  # which was said
            self._file.close()

    def _put(self, lines: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        try:
            if not self._full:
                self._file.write(text)
                self._file.flush()  # so that a process forked later has nothing to write again
        except OSError as error:
            self._full = True
            _LOG.warning("--trace ends here, the run goes on: %s: %s.", self._file.name, error)


def read_folder(folder: Path) -> list[RankTrace]:
    """Every rank's trace, by rank; ValueError where they are none of one run."""
    traces = [read_rank(path) for path in sorted(folder.glob("rank_*.jsonl"))]
    if not traces:
        raise ValueError(
            f"{folder} holds no rank_*.jsonl: expected a folder that a run with --trace wrote."
        )
    first = traces[0]
    for trace in traces:
        if trace.world_size != first.world_size:
            raise ValueError(
                f"{rank_file(folder, trace.rank)} is of a run of {trace.world_size} ranks, that of"
                f" rank {first.rank} of one of {first.world_size}: remove the older run's files."
            )
    return traces


def read_rank(path: Path) -> RankTrace:
    """One rank's trace; a last line without its end is left out. Raises as read_folder does."""
    *lines, rest = path.read_text(errors="replace").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON ({error}): remove the file.") from error
    if not rows or "rank" not in rows[0]:
        raise ValueError(f"{path} does not begin with a rank: --trace did not write it; remove it.")
    events = []
    for row in rows:
        if "phase" in row:
            own = {key: row.pop(key) for key in _OWN_KEYS}
            events.append(TraceEvent(**own, details=row))
    place: Mapping[str, int] = next((row["place"] for row in rows if "place" in row), {})
    return RankTrace(**rows[0], place=place, events=tuple(events), cut_off=bool(rest))
