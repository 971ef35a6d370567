"""What an export wrote into its folder: the list of its files, kept beside them."""

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST_FILE = "loongplug_export.json"
HIDDEN = ".loongplug_export"  # where the files of an export under way are
_VERSION = 1
_DIGITS = 64  # of a sha256


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of one export, by their places in its folder, such as ``a.json`` or ``b/c.md``.

    ``kind`` is what the export is of, so that adapters do not replace a model.
    """

    kind: str
    files: Mapping[str, WrittenFile]


# What tells that a file was not touched since it was last looked at: size, time, number.
Seen = tuple[int, int, int]


def digest_of(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the list into ``folder``."""
    text = json.dumps({"version": _VERSION} | asdict(manifest), indent=2) + "\n"
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """The list in ``folder``, or None where there is none.

    Raises:
        ValueError: it is damaged, or names anything but files of the folder.
    """
    path = folder / MANIFEST_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    try:
        kind, files = found["kind"], found["files"]
        named = {name: WrittenFile(**entry) for name, entry in files.items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, "it is not a list of files") from error
    if found.get("version") != _VERSION or not isinstance(kind, str):
        raise _damaged(path, f"its version is not {_VERSION}")
    for name, file in named.items():
        if not _is_plain(name) or not _is_entry(file):
            raise _damaged(path, f"{name!r} is not a file of the folder with its size and sha256")
    return Manifest(kind=kind, files=named)


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path}, the list of what an export wrote there, cannot be used ({why}): give another "
        "folder, or remove this one yourself."
    )


def _is_plain(name: str) -> bool:
    parts = {*name.split("/")}
    return name != MANIFEST_FILE and "\0" not in name and not parts & {"", ".", "..", HIDDEN}


def _is_entry(file: WrittenFile) -> bool:
    digest = file.sha256
    return type(file.size) is int and isinstance(digest, str) and len(digest) == _DIGITS


def changed_files(folder: Path, manifest: Manifest) -> list[str]:
    """The files of ``manifest`` that are not there, or not of their size; no content is read."""
    return [
        name
        for name, file in manifest.files.items()
        if (seen := seen_file(folder / name)) is None or seen[0] != file.size
    ]


def other_contents(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Those of the files ``names`` whose content is not what was written; each is read whole."""
    return [name for name in names if digest_of(folder / name) != manifest.files[name].sha256]


def seen_file(path: Path) -> Seen | None:
    """A regular file as it is now; None for anything else, links and what is behind them."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or path.parent.resolve() != path.parent:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def replaceable(folder: Path, *, kind: str) -> Manifest | None:
    """The manifest of the export in ``folder``, whose files are there; None for an empty folder."""
    manifest = read_manifest(folder)
    if manifest is None:
        if any(path.name != HIDDEN for path in folder.iterdir()):
            raise ValueError(
                f"{folder} is not empty and is not an earlier export of LoongPlug, which an export "
                f"would replace: it has no {MANIFEST_FILE}, the list of the exported files. Give "
                "another folder, or empty this one yourself."
            )
        return None
    if manifest.kind != kind:
        raise ValueError(
            f"{folder} has an export of another kind ({manifest.kind}, not {kind}): give another "
            "folder."
        )
    refuse_changed(folder, changed_files(folder, manifest))
    return manifest


def refuse_changed(folder: Path, names: Iterable[str]) -> None:
    """ValueError where there are ``names``: of files that are not as they were exported."""
    if changed := sorted(names):
        raise ValueError(
            f"{folder} has files that were changed or removed since LoongPlug exported them: "
            f"{', '.join(changed)}. Give another folder, or empty this one yourself."
        )


def refuse_foreign(folder: Path, names: Iterable[str]) -> None:
    """ValueError where there are ``names``: of files that an export did not write."""
    if foreign := sorted(names):
        raise ValueError(
            f"{folder} has files that LoongPlug did not write, under names that the export needs: "
            f"{', '.join(foreign)}. Give another folder, or move them away."
        )
