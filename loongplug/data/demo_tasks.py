"""What the demo data ask about handwritten digits, and the right answers."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of question, and its right answer for the digits it is about."""

    name: str
    share: float  # of all samples
    counts: tuple[int, ...]  # how many digits a sample may have, each as likely
    ask: Callable[[Sequence[int]], str]
    answer: Callable[[Sequence[int]], str]
    with_scans: bool = True  # else the question carries the digits as text


def _join(digits: Sequence[int]) -> str:
    return "".join(str(digit) for digit in digits)


def _spell(digits: Sequence[int]) -> str:
    return " ".join(NUMBER_WORDS[digit] for digit in digits)


TASKS = (
    Task(
        name="read",
        share=0.64,
        counts=(1, 2, 3, 4, 5, 6),
        ask=lambda digits: "Read the digits.",
        answer=_join,
    ),
    Task(
        name="reverse",
        share=0.1,
        counts=(2, 3, 4),
        ask=lambda digits: "Read the digits in reverse order.",
        answer=lambda digits: _join(digits[::-1]),
    ),
    Task(
        name="largest",
        share=0.08,
        counts=(2, 3),
        ask=lambda digits: "Which digit is the largest?",
        answer=lambda digits: str(max(digits)),
    ),
    Task(
        name="count",
        share=0.08,
        counts=(1, 2, 3, 4, 5, 6),
        ask=lambda digits: "How many scans are there?",
        answer=lambda digits: str(len(digits)),
    ),
    Task(
        name="spelled",
        share=0.1,
        counts=(1, 2, 3, 4, 5, 6),
        ask=lambda digits: f"Write as digits: {_spell(digits)}",
        answer=_join,
        with_scans=False,
    ),
)


def choose_task(rng: random.Random) -> Task:
    """One of the tasks by their shares."""
    return rng.choices(TASKS, weights=[task.share for task in TASKS])[0]


def task_texts() -> list[str]:
    """Texts that together hold every word a question may have."""
    return [*(task.ask((0,)) for task in TASKS), f" {' '.join(NUMBER_WORDS)}"]
