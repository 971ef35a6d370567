"""How many answers are right, and what a person sees of an evaluation."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from loongplug.evaluate.questions import Question

WRONG_ANSWERS_SHOWN = 5
_SECONDS_BETWEEN_LINES = 5.0


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


@contextmanager
def progress(total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """A function to call with each number of newly answered questions.

    Shows a bar on a terminal, a plain line every few seconds elsewhere.
    """
    if console.is_terminal:
        columns = (
            TextColumn("evaluating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda count: bar.advance(task, count)
        return
    done, last = 0, time.monotonic()

    def line(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if done == total or now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            console.print(f"evaluating: {done}/{total}", highlight=False)

    yield line


def print_scores(console: Console, overall: Tally, *, by_kind: Mapping[str, Tally]) -> None:
    """The exact match, overall and per kind of question."""
    table = Table("questions", "right", "of", "exact match")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tally in (*by_kind.items(), ("all", overall)):
        table.add_row(Text(name), str(tally.correct), str(tally.total), f"{tally.share:.1%}")
    console.print(table)


def print_wrong(
    console: Console,
    questions: Sequence[Question],
    *,
    answers: Sequence[str],
    matches: Sequence[bool],
) -> None:
    """A few wrong answers with their places."""
    wrong = [
        (question, answer)
        for question, answer, match in zip(questions, answers, matches, strict=True)
        if not match
    ]
    if not wrong:
        return
    console.print(f"wrong answers ({min(len(wrong), WRONG_ANSWERS_SHOWN)} of {len(wrong)}):")
    for question, answer in wrong[:WRONG_ANSWERS_SHOWN]:
        line = f"  {question.where}: {answer.strip()!r} instead of {question.answer.strip()!r}"
        console.print(Text(line), soft_wrap=True)
