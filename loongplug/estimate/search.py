"""The changes that make a run fit. Each one that is named was estimated."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loongplug.estimate.changes import Change

ENOUGH = 3  # ways to choose among
SECONDS = 120.0  # of processor time; after so many no further estimate begins


@dataclass(frozen=True, kw_only=True)
class Way:
    """Changes, all at once, and the bytes that the fullest rank needs with them."""

    changes: tuple[Change, ...]
    needs: int

    def __str__(self) -> str:
        return " ".join(map(str, self.changes))


@dataclass(frozen=True, kw_only=True)
class Found:
    """``ways`` that fit, the cheapest first; else ``least`` is the one that needs least.

    ``tried`` counts what could be estimated; ``in_time`` is false where the time was too short to
    try all.
    """

    ways: tuple[Way, ...]
    least: Way | None
    tried: int
    in_time: bool


class Search:
    """Tries ``changes`` of a run that needs so many bytes, together and then one by one.

    ``estimate`` gives what the fullest rank needs with some of them, None where they are refused;
    ``fits`` says whether so many bytes do.
    """

    def __init__(
        self,
        changes: Sequence[Change],
        *,
        needs: int,
        estimate: Callable[[Sequence[Change]], int | None],
        fits: Callable[[int], bool],
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._changes = changes
        self._start = Way(changes=(), needs=needs)
        self._estimate = estimate
        self._fits = fits
        self._clock = clock
        self._until = clock() + SECONDS
        self._known: dict[tuple[Change, ...], Way | None] = {}
        self._in_time = True

    def found(self) -> Found:
        """The cheapest changes that are enough together, then single ones that are enough."""
        together = self._together()
        ways = [] if together is None else [together]
        # What is not enough with all that is cheaper is not enough alone.
        first = 0 if together is None else self._changes.index(together.changes[-1])
        for change in self._changes[first:] if ways else ():
            way = self._tried((change,))
            if way is not None and self._fits(way.needs) and way not in ways:
                ways.append(way)
            if len(ways) == ENOUGH:
                break
        tried = [way for way in self._known.values() if way is not None]
        least = min(tried, key=lambda way: way.needs, default=None)
        return Found(ways=tuple(ways), least=least, tried=len(tried), in_time=self._in_time)

    def _together(self) -> Way | None:
        """Change by change, each that lowers the need, until it fits; then without the needless."""
        best = self._start
        for change in self._changes:
            kept = tuple(each for each in best.changes if each.kind != change.kind)
            way = self._tried((*kept, change))
            if way is None or way.needs >= best.needs:
                continue
            best = way
            if self._fits(way.needs):
                return self._without_needless(way)
        return None

    def _without_needless(self, way: Way) -> Way:
        """Less the changes that it fits without, the dearest of them first."""
        for change in reversed(way.changes[:-1]):  # it did not fit before the last one
            fewer = self._tried(tuple(each for each in way.changes if each is not change))
            if fewer is not None and self._fits(fewer.needs):
                way = fewer
        return way

    def _tried(self, changes: tuple[Change, ...]) -> Way | None:
        if changes not in self._known:
            if self._clock() > self._until:
                self._in_time = False
                return None
            needs = self._estimate(changes)
            self._known[changes] = None if needs is None else Way(changes=changes, needs=needs)
        return self._known[changes]
