"""Waiting for what has to happen, for as long as a busy machine takes."""

import time
from collections.abc import Callable

SECONDS = 120.0


def eventually(happened: Callable[[], object], *, seconds: float = SECONDS) -> None:
    """Return when it has; the bound is there so that a test ends which would not."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, f"it did not happen within {seconds:g} seconds"
        time.sleep(0.01)
