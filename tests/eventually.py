"""Waiting for what has to happen, for as long as a busy machine takes."""

import time
from collections.abc import Callable

SECONDS = 120.0


def eventually(happened: Callable[[], object]) -> None:
    """Return when it has; the bound is there so that a test ends which would not."""
    until = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < until, f"it did not happen within {SECONDS:g} seconds"
        time.sleep(0.01)
