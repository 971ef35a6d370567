"""What is wrong with a place that cannot be written to, in words for the user."""

import errno
from pathlib import Path

_FULL = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "No space left on device: the quota is used up",
}


def write_error(output: Path | str, error: OSError) -> ValueError:
    """The sentence for an ``output``, a path with or without its flag, that cannot be written."""
    cure = "make room, or give another place" if error.errno in _FULL else "give another place"
    return ValueError(f"{output} cannot be written ({words_of(error)}): {cure}.")


def words_of(error: BaseException) -> str:
    """What ``error`` says, with a full disk by the name that all know."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return _FULL[error.errno]
    return str(error)
