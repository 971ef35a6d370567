"""What the demo data ask about handwritten and spoken digits, and the right answers."""

import random
import re
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


@dataclass(frozen=True, kw_only=True)
class SoundTask:
    """A kind of question about spoken digits, and perhaps about scans beside them."""

    name: str
    share: float  # of all samples of its file
    sounds: int  # in a sample
    spoken: tuple[int, ...]  # how many digits a sound may have, each as likely
    scans: tuple[int, ...] = (0,)  # how many a sample may have
    ask: str

    def answer(self, *, seen: Sequence[int], heard: Sequence[int]) -> str:
        """All digits in order, with spaces; what is seen first, and a comma between."""
        each = (" ".join(map(str, digits)) for digits in (seen, heard) if digits)
        return ", ".join(each)


_HEARD = "Which digits do you hear?"

AUDIO_TASKS = (
    SoundTask(name="hear", share=0.8, sounds=1, spoken=(1, 2, 3, 4), ask=_HEARD),
    SoundTask(name="hear_two", share=0.2, sounds=2, spoken=(1, 2), ask=_HEARD),
)

BOTH_TASKS = (
    SoundTask(
        name="see_and_hear",
        share=1.0,
        sounds=1,
        spoken=(1, 2, 3),
        scans=(1, 2, 3),
        ask="Which digits do you see, and which do you hear?",
    ),
)


def choose_task[AnyTask: (Task, SoundTask)](
    rng: random.Random, tasks: Sequence[AnyTask]
) -> AnyTask:
    """One of ``tasks`` by their shares."""
    return rng.choices(tasks, weights=[task.share for task in tasks])[0]


def _words(texts: Sequence[str]) -> tuple[str, ...]:
    """Words of more than one letter in the texts, with the space before them."""
    return tuple(sorted({word for text in texts for word in re.findall(r" ?[A-Za-z]{2,}", text)}))


_TEXTS = [*(task.question((0,)) for task in TASKS), f" {' '.join(NUMBER_WORDS)}"]

# What the tokenizers of the demo know by one token.
WORDS = _words(_TEXTS)
SOUND_WORDS = _words([*_TEXTS, *(task.ask for task in (*AUDIO_TASKS, *BOTH_TASKS))])
