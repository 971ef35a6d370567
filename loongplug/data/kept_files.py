"""What is made of a data file once and kept: beside it, or in the user's cache folder."""

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOG = logging.getLogger(__name__)


def version(path: Path) -> tuple[int, int]:
    """Size and time of change: equal to itself later only while nothing has written to the file."""
    state = path.stat()
    return state.st_size, state.st_mtime_ns


class ChangedFileError(ValueError):
    """A file of rows is another one than at the start: that ends a run, it is no bad sample."""


def require_version(path: Path, expected: tuple[int, int]) -> None:
    """Raise ChangedFileError, alike for each row, where the file is not of this version."""
    if not path.exists() or version(path) != expected:
        raise ChangedFileError(
            f"{path} has changed since the start of this run, which no longer knows where its rows "
            "are: start the run again, and leave its data as they are."
        )


def places(path: Path, *, suffix: str) -> list[Path]:
    """Where what is made of the file may be kept, the first place that can be written."""
    name = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    return [path.with_name(f"{path.name}{suffix}"), user_cache() / f"{name}{suffix}"]


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
