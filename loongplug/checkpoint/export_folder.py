"""The folder of an export: filled beside its place, then put there by a rename.

An export takes the place of nothing, of an empty folder, or of a folder that is wholly an earlier
export. A list in each export tells: it names every file, with its size and when it was written.
"""

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from loongplug.checkpoint.common_errors import together, write_error
from loongplug.checkpoint.parameter_holders import own_rank
from loongplug.output_files import flush

EXPORT_LIST = "loongplug_export.json"
_VERSION = 2
_SHOWN = 5

# Of each file of a folder its size and time; None for what no export makes.
_Files = dict[str, dict[str, int] | None]


def check_export_folder(folder: Path, *, kind: str) -> None:
    """Refuse a folder whose place an export of ``kind`` cannot take; for the start of a run.

    For one rank; no collectives. Puts back what a killed export had moved away.
    """
    folder = folder.resolve()
    try:
        if _beside(folder).exists():
            with _alone(folder):
                pass
        _refuse_others(folder, folder, kind=kind)
        if folder.exists() and not os.access(folder, os.W_OK):  # it could not be moved away
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise write_error(folder, error) from error


@contextmanager
def new_export(folder: Path, *, kind: str) -> Iterator[Path]:
    """A new folder to fill, which takes the place of ``folder`` when the context ends.

    All ranks may write into the new folder, so all must see it; rank 0 makes and moves it. An error
    has to leave the context on all ranks together; the earlier export is then as it was.
    Collective: the default group.
    """
    folder = folder.resolve()
    new = _beside(folder) / "new"
    with ExitStack() as held:
        with together(folder):
            if own_rank() == 0:
                held.enter_context(_alone(folder))
                _refuse_others(folder, folder, kind=kind)
                new.mkdir()
        yield new
        with together(folder):
            if own_rank() == 0:
                _put_in_place(new, folder, kind=kind)


def is_half_replaced(folder: Path) -> bool:
    """Whether an earlier export was moved away from ``folder`` by a run that was killed then."""
    return (_beside(folder.resolve()) / "old").is_dir()


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.loongplug_export")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The hidden folder beside an export's, for one run at a time; it goes with the context.

    The kernel's lock ends with its process, on whatever host the next export is.
    """
    beside = _beside(folder)
    beside.mkdir(parents=True, exist_ok=True)
    held = os.open(beside, os.O_RDONLY)
    try:
        if not _locked(held, beside):
            raise ValueError(
                f"{folder} is in use by another run, which exports to it: wait until it has ended,"
                " or give another folder."
            )
        _clear(folder)
        try:
            yield
        finally:
            with suppress(OSError):  # the next export does it
                _clear(folder)
                beside.rmdir()
    finally:
        os.close(held)


def _locked(held: int, beside: Path) -> bool:
    """Whether this process alone has the folder, which no other has removed meanwhile."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return os.path.samestat(os.fstat(held), beside.stat())


def _clear(folder: Path) -> None:
    """Remove what exports left beside ``folder``; an earlier export without a successor returns."""
    beside = _beside(folder)
    new, old, gone = beside / "new", beside / "old", beside / "gone"
    for path in (beside, new, old, gone):
        if path.is_symlink():  # what is behind it is no export's to move or remove
            raise OSError(f"{path} is a link")
    if old.exists():
        if not folder.exists() or not any(folder.iterdir()):
            old.rename(folder)
        elif (folder / EXPORT_LIST).is_file():
            shutil.rmtree(gone, ignore_errors=True)
            old.rename(gone)  # nobody puts back what is half removed
    shutil.rmtree(gone, ignore_errors=True)  # somebody may still read it
    if new.exists():
        shutil.rmtree(new)


def _put_in_place(new: Path, folder: Path, *, kind: str) -> None:
    """Give the filled folder its place; the export that was there goes, or returns on an error."""
    content = {"version": _VERSION, "kind": kind, "files": _files(new)}
    (new / EXPORT_LIST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for path in (*new.rglob("*"), new):
        flush(path)
    old = _beside(folder) / "old"
    replaces = folder.exists() and any(folder.iterdir())
    if folder.exists():
        shutil.copymode(folder, new)
    if replaces:
        folder.rename(old)
    try:
        if replaces:  # nobody finds it now: what came there meanwhile shows
            _refuse_others(old, folder, kind=kind)
        new.rename(folder)  # over an empty folder, too
    except BaseException:
        if replaces:
            old.rename(folder)
        raise
    flush(folder.parent)


def _files(folder: Path) -> _Files:
    """All that is in ``folder`` and below, by place; links and empty folders are no export's."""
    found: _Files = {}
    for place, folders, files in folder.walk():
        for path in (place / name for name in files):
            seen = path.lstat()
            plain = {"size": seen.st_size, "written_ns": seen.st_mtime_ns}
            name = path.relative_to(folder).as_posix()
            found[name] = plain if stat.S_ISREG(seen.st_mode) else None
        if not (folders or files or place == folder):
            found[f"{place.relative_to(folder).as_posix()}/"] = None
    return found


def _refuse_others(at: Path, folder: Path, *, kind: str) -> None:
    """Refuse ``folder``, which lies ``at`` a place now, unless an export may replace it."""
    if not at.exists():
        return
    if not at.is_dir():
        raise ValueError(f"{folder} is a file: give a folder.")
    if os.path.ismount(at):
        raise ValueError(f"{folder} is a mount, which no export can replace: give a folder in it.")
    found = _files(at)
    if found and (reason := _no_export(at, found, kind=kind)):
        raise ValueError(
            f"{folder} is not empty and is not wholly an earlier export of LoongPlug, which an "
            f"export would replace: {reason}. Give another folder, or empty this one yourself."
        )


def _no_export(folder: Path, found: _Files, *, kind: str) -> str:
    """Why the ``found`` files are not those of an earlier export; empty where they are."""
    if found.pop(EXPORT_LIST, None) is None:
        return f"it has no {EXPORT_LIST}, the list of the exported files"
    try:
        listed: Any = json.loads((folder / EXPORT_LIST).read_text(encoding="utf-8"))
        version, other, files = listed["version"], listed["kind"], dict(listed["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"its {EXPORT_LIST} is damaged"
    if version != _VERSION:
        return f"its {EXPORT_LIST} is of another version of LoongPlug"
    if other != kind:
        return f"it is an export of another kind ({other}, not {kind})"
    changed = [name for name in files if found.get(name) != files[name]]
    added = found.keys() - files.keys()
    told = {"changed or removed since": changed, "not from the export": added}
    return "; ".join(f"{what}: {_some(names)}" for what, names in told.items() if names)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join([*ordered[:_SHOWN], "..."] if len(ordered) > _SHOWN else ordered)
