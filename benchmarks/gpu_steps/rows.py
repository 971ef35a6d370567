"""A step's figures, written line by line, so that a step that is ended leaves what it has."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

type Figure = float | int | str | None

NO_ERROR_TEXT = "no text"
_LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a step's table: what was measured, or the reason why it was not."""

    case: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class Rows:
    """The rows of one step, in a file; processes of the step add to it in turn."""

    path: Path

    def add(self, case: str, **figures: Figure) -> None:
        """What was measured; a ``_`` in a figure's name is shown as a space."""
        self.put_figures(case, {name.replace("_", " "): each for name, each in figures.items()})

    def put_figures(self, case: str, figures: Mapping[str, Figure]) -> None:
        """The same with names as they are shown."""
        self.put(Row(case=case, figures=figures))

    def missing(self, case: str, reason: str | BaseException) -> None:
        """Why nothing was measured."""
        text = reason if isinstance(reason, str) else reason_of(reason)
        self.put(Row(case=case, reason=text))

    def put(self, row: Row) -> None:
        """Append ``row`` in one piece."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def read(self) -> list[Row]:
        """All rows that are whole: the last may have been cut when the step was ended."""
        if not self.path.is_file():
            return []
        *lines, _ = self.path.read_text(encoding="utf-8").split("\n")
        return [Row(**json.loads(line)) for line in lines]

    def figure(self, case: str, name: str) -> float | None:
        """A number that was measured; None where it was not."""
        found = [row.figures.get(name) for row in self.read() if row.case == case]
        return next((float(value) for value in found if isinstance(value, int | float)), None)


def reason_of(error: BaseException) -> str:
    """The error's kind and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else NO_ERROR_TEXT}"
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + " ..."
