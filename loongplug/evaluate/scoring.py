"""Compare answers with what the data say."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tally:
    """How many answers there were and how many of them were right."""

    correct: int
    total: int

    @property
    def share(self) -> float:
        """The exact match, from 0 to 1."""
        return self.correct / self.total if self.total else 0.0


def is_match(given: str, expected: str) -> bool:
    """Whether two answers are the same text, white space around them aside."""
    return given.strip() == expected.strip()


def tally(matches: Sequence[bool]) -> Tally:
    """The count over all answers."""
    return Tally(correct=sum(matches), total=len(matches))


def tally_by_kind(matches: Sequence[bool], kinds: Sequence[str | None]) -> dict[str, Tally]:
    """The count per kind of question, by name; questions without a kind are left out."""
    names = sorted({kind for kind in kinds if kind is not None})
    pairs = list(zip(matches, kinds, strict=True))
    return {name: tally([match for match, kind in pairs if kind == name]) for name in names}
