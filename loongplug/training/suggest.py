"""The closest known name to a misspelt one, for error messages."""

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that most resembles ``name``, or None when nothing does."""
    matches = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def the_closest_is(name: str, known: Iterable[str]) -> str:
    """``"; the closest is X"``, or nothing when no known name resembles ``name``."""
    match = closest(name, known)
    return f"; the closest is {match}" if match is not None else ""
