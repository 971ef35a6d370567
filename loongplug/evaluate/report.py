"""How many answers are right, and what a person sees of an evaluation."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from loongplug.evaluate.questions import Question
from loongplug.output_files import PREDICTIONS, write_output

WRONG_ANSWERS_SHOWN = 5
_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Tally:
    """What the answers to some questions are worth, each from 0 to 1, and how many there are."""

    points: float
    total: int

    @property
    def share(self) -> float:
        """The mean score, from 0 to 1."""
        return self.points / self.total if self.total else 0.0


def tally(scores: Sequence[float]) -> Tally:
    """Over all answers."""
    return Tally(points=sum(scores), total=len(scores))


def tally_by_task(scores: Sequence[float], tasks: Sequence[str | None]) -> dict[str, Tally]:
    """Per task, by name; questions without a task are left out."""
    names = sorted({task for task in tasks if task is not None})
    pairs = list(zip(scores, tasks, strict=True))
    return {name: tally([score for score, task in pairs if task == name]) for name in names}


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


def print_scores(
    console: Console, overall: Tally, *, by_task: Mapping[str, Tally], title: str
) -> None:
    """The scores overall and per task; ``title`` names the metric."""
    table = Table("task", "right", "of", title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tally in (*by_task.items(), ("all", overall)):
        table.add_row(Text(name), f"{tally.points:.6g}", str(tally.total), f"{tally.share:.1%}")
    console.print(table)


def print_wrong(
    console: Console,
    questions: Sequence[Question],
    *,
    answers: Sequence[str],
    scores: Sequence[float],
) -> None:
    """A few answers with their places; not all of them are right."""
    wrong = [
        (question, answer)
        for question, answer, score in zip(questions, answers, scores, strict=True)
        if score < 1
    ]
    if not wrong:
        return
    console.print(f"wrong answers ({min(len(wrong), WRONG_ANSWERS_SHOWN)} of {len(wrong)}):")
    for question, answer in wrong[:WRONG_ANSWERS_SHOWN]:
        line = f"  {question.where}: {answer.strip()!r} instead of {question.answer.strip()!r}"
        console.print(Text(line), soft_wrap=True)


def write_predictions(
    path: Path,
    questions: Sequence[Question],
    *,
    answers: Sequence[str],
    scores: Sequence[float],
) -> None:
    """One JSON object a line, in the order of the questions."""
    text = ""
    for question, answer, score in zip(questions, answers, scores, strict=True):
        found = {
            "row": question.where,
            "task": question.task,
            "question": question.text,
            "answer": question.answer,
            "prediction": answer,
            "score": score,
        }
        text += json.dumps(found, ensure_ascii=False) + "\n"
    write_output(path, text, PREDICTIONS)
