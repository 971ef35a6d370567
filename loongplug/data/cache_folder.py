"""Where what is made of a data file once is kept: beside it, or in the user's cache folder."""

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOG = logging.getLogger(__name__)


def places(path: Path, *, suffix: str) -> list[Path]:
    """Where what is made of the file may be kept, the first place that can be written."""
    name = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    return [path.with_name(f"{path.name}{suffix}"), user_cache() / f"{name}{suffix}"]


class NotKeptError(ValueError):
    """There is no place for what is made of a file."""


def keep(found: list[Path], write: Callable[[Path], object], what: str) -> Path:
    """The first of the places that takes what ``write`` puts there; NotKeptError without one."""
    refusals = []
    for place in found:
        try:
            write(place)
        except OSError as error:
            refusals.append(f"{place.parent}: {error.strerror}")
        else:
            return place
    raise NotKeptError(
        f"{what} cannot be kept anywhere ({'; '.join(refusals)}): make room, or set XDG_CACHE_HOME"
        " to a folder that has some."
    )


def user_cache() -> Path:
    """The folder of what is kept for this user; it need not be there."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "loongplug"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """While no other process is, where the file system knows locks; else all do the same work."""
    handle = os.open(path, os.O_RDONLY)  # a file or a folder
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def said_by(first: bool) -> Iterator[None]:
    """Of ranks that open the same files, have the ``first`` alone say what is made again."""
    before = LOG.disabled
    LOG.disabled = before or not first
    try:
        yield
    finally:
        LOG.disabled = before
