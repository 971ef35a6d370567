"""What an answer is worth: exact match, contains, a number within a tolerance, an own function."""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from loongplug.models.registry import trusted_object, within

# A minus that joins two numbers (3-4) is no sign; commas stand between thousands.
_NUMBER = re.compile(r"(?:(?<![\w.])[-+])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Metric:
    """A score from 0 (wrong) to 1 (right) for a prediction, given the right answer."""

    key: str  # its name in JSON
    title: str  # its name for people
    score: Callable[[str, str], float]  # of a prediction and the right answer


def metric_named(
    name: str, *, tolerance: float | None = None, trusted_packages: Sequence[str] = ()
) -> Metric:
    """The metric that ``--metric`` names.

    ``exact``: the same text, white space around it aside. ``contains``: the right answer occurs in
    the prediction. ``number``: the last number of the prediction differs from that of the right
    answer by at most ``tolerance`` times the latter (0 unless given). Else a function of a trusted
    package, ``package.module.function(prediction, answer) -> float``.
    """
    if tolerance is not None and (name != "number" or not 0 <= tolerance < math.inf):
        raise ValueError(
            f"--tolerance is {tolerance} with --metric {name}: expected 0 or more (0.05: 5 % of the"
            " right answer), and --metric number."
        )
    share = tolerance or 0.0
    title = f"number within {share:.3g}" if share else "same number"
    known = {
        "exact": Metric("exact_match", "exact match", is_match),
        "contains": Metric("contains", "contains", _contains),
        "number": Metric("number", title, partial(_is_near, tolerance=share)),
    }
    if name in known:
        return known[name]
    if "." not in name:
        raise ValueError(
            f"--metric is {name!r}: expected exact, contains, number, or a function of a package"
            " that --trusted-packages names, such as my_package.scores.relaxed."
        )
    return Metric(name.rpartition(".")[2], name, _own_function(name, trusted_packages))


def is_match(given: str, expected: str) -> bool:
    """Whether two answers are the same text, white space around them aside."""
    return given.strip() == expected.strip()


def _contains(given: str, expected: str) -> bool:
    if not expected.strip():
        raise ValueError("it is empty, which every prediction contains")
    return expected.strip() in given


def _is_near(given: str, expected: str, *, tolerance: float) -> bool:
    right, found = _last_number(expected), _last_number(given)
    if right is None:
        raise ValueError("it has no number, which --metric number compares")
    return found is not None and abs(found - right) <= tolerance * abs(right)


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _own_function(name: str, trusted_packages: Sequence[str]) -> Callable[[str, str], float]:
    found: Any = trusted_object(
        name,
        packages=trusted_packages,
        cure="to score with a function of your own, name its package with --trusted-packages",
    )
    if not inspect.isfunction(found) or not within(f"{found.__module__}.", trusted_packages):
        raise ValueError(f"--metric {name} is not a function of {' or '.join(trusted_packages)}")

    def score(given: str, expected: str) -> float:
        try:
            value = found(given, expected)
        except Exception as error:  # whatever a user's function raises
            raise ValueError(f"{name} fails with {type(error).__name__}: {error}") from error
        if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
            raise ValueError(f"{name} gives {value!r:.80}: expected a number from 0 to 1")
        return float(value)

    return score
