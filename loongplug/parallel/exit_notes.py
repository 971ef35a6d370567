"""What ranks leave for our launcher of how they ended.

Torchrun has no code of ranks that end because it was told to end. So each rank leaves a file in a
folder of the launcher's while it is to save before it ends, and its code where it fails.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER_VARIABLE = "LOONGPLUG_ENDINGS_FOLDER"

_FAILED, _AT_WORK = "failed", "rank_"


def saves_when_told() -> None:
    """From here on SIGTERM asks this rank to save: if it never ends by itself, it was killed."""
    with _folder() as folder:
        _mine(folder).touch()


def ended() -> None:
    """This rank ends by itself."""
    with _folder() as folder:
        _mine(folder).unlink(missing_ok=True)


def failed(code: int) -> None:
    """This rank ends by itself, with a code that is not 0."""
    with _folder() as folder:
        (folder / _FAILED).write_text(str(code))
    ended()


def failed_code(folder: Path) -> int | None:
    """The code of a rank that has failed; None where none has."""
    path = folder / _FAILED
    return int(path.read_text() or 1) if path.exists() else None


def killed_ranks(folder: Path) -> list[int]:
    """Ranks that have not come to their end, once none is left."""
    return sorted(int(path.name.removeprefix(_AT_WORK)) for path in folder.glob(f"{_AT_WORK}*"))


def _mine(folder: Path) -> Path:
    return folder / f"{_AT_WORK}{os.environ.get('RANK', '0')}"


@contextmanager
def _folder() -> Iterator[Path]:
    """The launcher's folder; where there is none, files in one that is not there either."""
    with suppress(OSError):
        yield Path(os.environ.get(FOLDER_VARIABLE, os.devnull))
