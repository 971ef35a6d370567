"""Many cases alike: a few are run by every run of the tests, the others with ``--all``."""

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[str], *, but: Iterable[str]) -> list[Any]:
    """Cases as parameters, marked for ``--all`` alone ``but`` for these few."""
    few = {*but}
    cases = [*cases]
    assert few <= {*cases}, f"{few - {*cases}} are none of {cases}"
    return [pytest.param(each, marks=() if each in few else pytest.mark.sweep) for each in cases]
