"""A folder that is filled beside an older one and takes its place when it is complete."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loongplug.checkpoint.agreement import raise_together


@contextmanager
def replaced_folder(folder: Path, *, rank: int) -> Iterator[Path]:
    """A new folder to fill, which takes ``folder``'s place when the context ends without error.

    Rank 0 makes and moves folders; all ranks may write into the new one, which they must all see.
    An error has to leave the context on all ranks together. Collective: the default group.
    """
    folder = folder.resolve()
    building = folder.with_name(f".{folder.name}.new")
    before = folder.with_name(f".{folder.name}.old")
    error: Exception | None = None
    try:
        if rank == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _restore(folder, before)  # a run may have been killed here
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
    except OSError as caught:
        error = ValueError(f"{folder} cannot be written ({caught}): give another folder.")
    raise_together(error)
    try:
        yield building
        try:
            if rank == 0:
                if folder.exists():
                    folder.rename(before)
                building.rename(folder)
        except OSError as caught:
            error = ValueError(f"{folder} cannot be replaced ({caught}): give another folder.")
        raise_together(error)  # and no rank leaves before the folder is in place
    except BaseException:
        if rank == 0:
            _restore(folder, before)
            shutil.rmtree(building, ignore_errors=True)
        raise
    if rank == 0:
        shutil.rmtree(before, ignore_errors=True)


def _restore(folder: Path, before: Path) -> None:
    """Put the older folder back where only it is left."""
    if before.exists() and (not folder.exists() or not any(folder.iterdir())):
        shutil.rmtree(folder, ignore_errors=True)
        before.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
