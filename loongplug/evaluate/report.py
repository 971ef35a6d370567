"""How many answers are right, and what a person sees of an evaluation."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loongplug.evaluate.questions import Question
from loongplug.output_files import PREDICTIONS, write_output

WRONG_ANSWERS_SHOWN = 5


@dataclass(frozen=True)
class Answered:
    """A question with the model's answer, and what that is worth, from 0 to 1."""

    question: Question
    answer: str
    score: float


def scores_by_task(answered: Sequence[Answered]) -> dict[str, list[float]]:
    """The scores of each task, by its name; questions without a task are left out."""
    found: dict[str, list[float]] = {}
    for each in answered:
        if each.question.task is not None:
            found.setdefault(each.question.task, []).append(each.score)
    return dict(sorted(found.items()))


def print_scores(
    console: Console, scores: Sequence[float], *, by_task: Mapping[str, Sequence[float]], title: str
) -> None:
    """The scores per task and overall; ``title`` names the metric."""
    table = Table("task", "right", "of", title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, each in (*by_task.items(), ("all", scores)):
        table.add_row(Text(name), f"{sum(each):.6g}", str(len(each)), f"{fmean(each):.1%}")
    console.print(table)


def print_wrong(console: Console, answered: Sequence[Answered]) -> None:
    """A few answers that are not all right, with their places."""
    wrong = [each for each in answered if each.score < 1]
    if not wrong:
        return
    console.print(f"wrong answers ({min(len(wrong), WRONG_ANSWERS_SHOWN)} of {len(wrong)}):")
    for each in wrong[:WRONG_ANSWERS_SHOWN]:
        right = each.question.answer.strip()
        line = f"  {each.question.where}: {each.answer.strip()!r} instead of {right!r}"
        console.print(Text(line), soft_wrap=True)


def write_predictions(path: Path, answered: Sequence[Answered]) -> None:
    """One JSON object a line, in the order of the questions."""
    rows = (
        {
            "row": each.question.where,
            "task": each.question.task,
            "question": each.question.text,
            "answer": each.question.answer,
            "prediction": each.answer,
            "score": each.score,
        }
        for each in answered
    )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_output(path, text, PREDICTIONS)
