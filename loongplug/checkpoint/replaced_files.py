"""The files of an export: made in a hidden folder, then put in place of an older export's files.

Only files that the older export's manifest names are replaced or removed, and only where they are
as they were written. Everything else in the folder stays, and is never written over.

The steps of a replacement, each a rename, are such that whoever finds them cut short knows which
are still to do: what is in ``old`` has left, what is no longer in ``new`` has come. Configs leave
first and come last, so that no program takes a mixture of two exports for a model.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from loongplug.checkpoint.agreement import of_all_ranks, together, write_error
from loongplug.checkpoint.manifest import (
    HIDDEN,
    MANIFEST_FILE,
    Manifest,
    Seen,
    WrittenFile,
    changed_files,
    digest_of,
    other_contents,
    read_manifest,
    refuse_changed,
    refuse_foreign,
    replaceable,
    seen_file,
    write_manifest,
)
from loongplug.checkpoint.tracker import flush

# Files that are read at the start of a run already. A folder of 60 GB would take a minute there.
_READ_AT_START_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Building:
    """The folder to fill, and the digests of the files that this rank wrote, where it knows them.

    Files without a digest are read for it, by the first rank. ``target`` is where they will be.
    """

    folder: Path
    target: Path
    digests: dict[str, str] = field(default_factory=dict)


def check_replaceable(folder: Path, *, kind: str, writes: Callable[[str], bool]) -> None:
    """Refuse a folder that an export of ``kind`` cannot be put into.

    For one rank, at the start of a run. ``writes`` tells of a name whether the export may write a
    file of that name. Of small files the content is compared, of large ones the size only: the rest
    is for :func:`replaced_files`, which comes when there is something to put there. Finishes what a
    killed export left. No collectives.

    Raises:
        ValueError: the folder is a file, or has other files than an earlier export's and those
            that were added to it, or some of the export's own were changed.
    """
    folder = folder.resolve()
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: give a folder.")
        if not folder.is_dir():
            return
        with _alone(folder):
            _recover(folder)
        manifest = replaceable(folder, kind=kind)
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    except OSError as error:
        raise write_error(folder, error) from error
    if manifest is None:
        return
    small = [n for n, file in manifest.files.items() if file.size <= _READ_AT_START_BYTES]
    refuse_changed(folder, other_contents(folder, manifest, small))
    refuse_foreign(folder, {name for name in found - manifest.files.keys() if writes(name)})


@contextmanager
def replaced_files(folder: Path, *, kind: str, rank: int) -> Iterator[Building]:
    """A new folder to fill, whose files take the place of an older export's when the context ends.

    Rank 0 makes folders and moves files; all ranks may write into the new folder, and read the
    older files: each its share, for their digests. So all must see the folder. An error has to
    leave the context on all ranks together. Collective: the default group.

    Raises:
        ValueError: on all ranks, as :func:`check_replaceable`; or nothing can be written there.
    """
    folder = folder.resolve()
    hidden = folder / HIDDEN
    building = Building(hidden / "new", folder)
    with _first_alone(folder, rank=rank):
        seen: Mapping[str, Seen | None] = {}
        try:
            with together(folder):
                if rank == 0:
                    _recover(folder)
                    if older := replaceable(folder, kind=kind):
                        names = (MANIFEST_FILE, *older.files)
                        seen = {name: seen_file(folder / name) for name in names}
                    building.folder.mkdir(parents=True)
            with together(folder):
                _compare_share(folder)
            yield building
            digests = {name: each[name] for each in of_all_ranks(building.digests) for name in each}
            with together(folder):
                if rank == 0:
                    _replace(folder, seen=seen, kind=kind, digests=digests)
        except BaseException:
            if rank == 0:
                with suppress(OSError):
                    if not is_half_replaced(folder):  # which is left to the next start
                        _clear(hidden)
            raise
        if rank == 0:
            with suppress(OSError):  # the export is in place
                _clear(hidden)


def is_half_replaced(folder: Path) -> bool:
    """Whether a replacement in ``folder`` was cut short, and its next start has to finish it."""
    hidden = folder / HIDDEN
    return (hidden / "old").is_dir() and (hidden / "new" / MANIFEST_FILE).is_file()


@contextmanager
def _first_alone(folder: Path, *, rank: int) -> Iterator[None]:
    """Rank 0 alone has the folder, which it makes; collective."""
    made = False
    try:
        with ExitStack() as stack:
            with together(folder):
                if rank == 0:
                    new = not folder.exists()
                    folder.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(_alone(folder))
                    made = new
            yield
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()  # where nothing came into it


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A lock on the folder, which ends with the process or the context.

    Raises:
        ValueError: another process has it.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # of another kind where this file system locks no folders
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ValueError(
                    f"Another run is writing an export into {folder}: wait for it, or give another "
                    "folder."
                ) from error
        yield
    finally:
        os.close(held)


def _compare_share(folder: Path) -> None:
    """Compare the contents of this rank's share of the older export's files."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
    refuse_changed(folder, other_contents(folder, manifest, largest_first[rank::ranks]))


def _replace(
    folder: Path, *, seen: Mapping[str, Seen | None], kind: str, digests: Mapping[str, str]
) -> None:
    """Put the new files in the place of those that were ``seen``, or leave all as it was."""
    new, old = folder / HIDDEN / "new", folder / HIDDEN / "old"
    files = {
        name: WrittenFile(path.stat().st_size, digests.get(name) or digest_of(path))
        for path in sorted(new.rglob("*"))
        if path.is_file() and (name := path.relative_to(new).as_posix())
    }
    write_manifest(new, Manifest(kind, files))
    for path in new.rglob("*"):
        flush(path)
    flush(new)
    refuse_changed(folder, [name for name in seen if seen_file(folder / name) != seen[name]])
    coming = {MANIFEST_FILE, *files} - seen.keys()
    refuse_foreign(folder, filter(lambda name: os.path.lexists(folder / name), coming))
    old.mkdir()
    flush(folder / HIDDEN)
    done: list[tuple[Path, Path]] = []
    try:
        _move(folder, done)
    except BaseException:
        for source, target in reversed(done):
            target.rename(source)
        _remove(old)
        raise


def _move(folder: Path, done: list[tuple[Path, Path]]) -> None:
    """The renames of a replacement that are still to do; those that were done go to ``done``."""
    new, old = folder / HIDDEN / "new", folder / HIDDEN / "old"
    after = read_manifest(new)
    assert after is not None, new
    coming = [*_configs_last(after.files), MANIFEST_FILE]

    def move(source: Path, target: Path) -> None:
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True)
        if target.parent.resolve() != target.parent:
            raise OSError(f"{target.parent} is a link")
        source.rename(target)
        done.append((source, target))

    for name in _leaving(folder, coming):
        move(folder / name, old / name)
    flush(old)
    for name in coming:
        if (new / name).exists():
            if os.path.lexists(folder / name):  # another program put it there meanwhile
                refuse_foreign(folder, [name])
            move(new / name, folder / name)
    for parent in {(folder / name).parent for name in coming}:
        flush(parent)


def _leaving(folder: Path, coming: Iterable[str]) -> list[str]:
    """The older export's files that are still in their places, unchanged, in the order to leave.

    What is neither in ``old`` nor, by the same name, still in ``new`` has its successor there.
    """
    new, old = folder / HIDDEN / "new", folder / HIDDEN / "old"
    before = read_manifest(old) or read_manifest(folder)
    if before is None:
        return []
    names = [
        name
        for name in [MANIFEST_FILE, *reversed(_configs_last(before.files))]
        if (folder / name).exists()
        and not (old / name).exists()
        and (name not in coming or (new / name).exists())
    ]
    refuse_changed(folder, set(changed_files(folder, before)).intersection(names))
    return names


def _configs_last(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name.endswith(".json"), name))


def _recover(folder: Path) -> None:
    """End what a killed export left: a replacement that had begun is finished, all else goes."""
    _refuse_links(folder / HIDDEN)
    if is_half_replaced(folder):
        _move(folder, [])
    _clear(folder / HIDDEN)


def _clear(hidden: Path) -> None:
    """Remove the hidden folder, with files that exports made, or moved there."""
    _refuse_links(hidden)
    for folder in (hidden / "new", hidden / "old", hidden):
        _remove(folder)


def _remove(folder: Path) -> None:
    inside = [path for path in (folder, *folder.rglob("*")) if os.path.lexists(path)]
    for path in sorted(inside, reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def _refuse_links(hidden: Path) -> None:
    """What is behind a link is not an export's to move or remove."""
    for path in (hidden, hidden / "new", hidden / "old"):
        if path.is_symlink():
            raise OSError(f"{path} is a link")
