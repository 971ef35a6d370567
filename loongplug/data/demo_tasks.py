"""What the demo data ask about handwritten digits, and the right answers."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


_UP_TO_SIX = (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Task:
    """A kind of question, and its right answer for the digits it is about."""

    name: str
    share: float  # of all samples of its file
    counts: tuple[int, ...]  # how many digits a sample may have, each as likely
    ask: str  # with the digits spelled out for {}
    answer: Callable[[Sequence[int]], str]
    with_scans: bool = True  # else the question carries the digits as text

    def question(self, digits: Sequence[int]) -> str:
        """What to ask about these digits."""
        return self.ask.format(" ".join(NUMBER_WORDS[digit] for digit in digits))


def _join(digits: Sequence[int]) -> str:
    return "".join(map(str, digits))


TASKS = (
    Task("read", 0.64, _UP_TO_SIX, "Read the digits.", _join),
    Task(
        "reverse",
        0.1,
        (2, 3, 4),
        "Read the digits in reverse order.",
        lambda digits: _join(digits[::-1]),
    ),
    Task("largest", 0.08, (2, 3), "Which digit is the largest?", lambda digits: str(max(digits))),
    Task("count", 0.08, _UP_TO_SIX, "How many scans are there?", lambda digits: str(len(digits))),
    Task("spelled", 0.1, _UP_TO_SIX, "Write as digits: {}", _join, with_scans=False),
)

# What a model that has learned the others may be taught afterwards. The tokenizer does not know
# "smallest": it is spelled.
NEW_TASKS = (
    Task("smallest", 1.0, (2, 3), "Which digit is the smallest?", lambda digits: str(min(digits))),
)


def choose_task(rng: random.Random, tasks: Sequence[Task]) -> Task:
    """One of ``tasks`` by their shares."""
    return rng.choices(tasks, weights=[task.share for task in tasks])[0]


def task_texts() -> list[str]:
    """Texts that together hold every word a question of ``TASKS`` may have."""
    return [*(task.question((0,)) for task in TASKS), f" {' '.join(NUMBER_WORDS)}"]
