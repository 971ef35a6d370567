"""Files of media: files of their own, members of a tar archive, or within a row.

Rows name them, so nothing is opened but plain files: a pipe would hang, a device may do something.
"""

import base64
import io
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from loongplug.data.object_store import RangeReader, RemoteFile, is_remote, open_remote


@dataclass(frozen=True)
class TarMember:
    """A file within an uncompressed tar archive, by the place of its bytes there."""

    archive: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.archive}:{self.name}"


@dataclass(frozen=True)
class ConfinedFile:
    """A file that is opened only if it lies in a folder, once all links have been followed."""

    path: Path
    folder: str  # without links

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class InlineFile:
    """A file that stands in the row itself, as a ``data:`` URL has it."""

    kind: str
    content: bytes = field(repr=False)

    @classmethod
    def of_url(cls, url: str) -> "InlineFile":
        """What a URL such as ``data:image/png;base64,iVBO...`` holds; ValueError for another."""
        head, comma, content = url.partition(",")
        kind, *words = head.removeprefix("data:").split(";")
        try:
            if not comma or words[-1:] != ["base64"]:
                raise ValueError
            return cls(kind, base64.b64decode(content, validate=True))
        except ValueError:
            raise ValueError(
                f"{url[:40]!r} is not a file that can be read: expected data:image/png;base64,..."
                " or data:audio/wav;base64,..."
            ) from None

    def __str__(self) -> str:
        return f"of {len(self.content)} bytes in the row"


MediaFile = Path | TarMember | ConfinedFile | InlineFile | RemoteFile


class MediaRoot(Protocol):
    """What the names of media in a row start at: a folder, or the files beside the row."""

    def __truediv__(self, name: str, /) -> MediaFile:
        """The file of this name; ValueError where it is known that there is none."""
        ...


class ConfinedFolder:
    """A folder at which the names of media start, and out of which none of them may lead."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._real = os.path.realpath(folder)

    def __truediv__(self, name: str, /) -> ConfinedFile | RemoteFile:
        """The file of this name; where it lies is asked when it is opened."""
        if is_remote(name):
            return RemoteFile.named(name, folder=self._real)
        return ConfinedFile(self._folder / name, self._real)


class RemoteFolder:
    """A folder on an object store at which the names of media start."""

    def __init__(self, url: str, *, confined: bool) -> None:
        self._url = RemoteFile.named(url.rstrip("/")).url
        self._confined = confined

    def __truediv__(self, name: str, /) -> MediaFile:
        """The file of this name there; of an absolute path the file here, unless it is confined."""
        if name.startswith("/"):
            return ConfinedFile(Path(name), self._url) if self._confined else Path(name)
        url = name if is_remote(name) else f"{self._url}/{name}"
        return RemoteFile.named(url, folder=self._url if self._confined else None)


def media_named(name: str, root: MediaRoot) -> MediaFile:
    """The file that a row names; a plain folder knows no URLs, other roots say themselves."""
    return RemoteFile.named(name) if isinstance(root, Path) and is_remote(name) else root / name


def file_on_disk(file: MediaFile) -> Path:
    """The file itself, or the archive that it is in; of one within a row or far away is none."""
    assert not isinstance(file, InlineFile | RemoteFile)
    if isinstance(file, TarMember):
        return file.archive
    return file.path if isinstance(file, ConfinedFile) else file


def open_media_file(file: MediaFile, *, header: bool = False) -> BinaryIO:
    """The file's bytes, to be closed by the caller; of a member, no others can be reached.

    Of a file on an object store the whole is fetched and kept, unless no more than the ``header``
    is read. OSError, too, for what is no plain file, and for a confined file that lies elsewhere.
    """
    if isinstance(file, InlineFile):
        return io.BytesIO(file.content)
    if isinstance(file, TarMember):
        handle = _open(file)
        return io.BufferedReader(
            RangeReader(
                file.size,
                lambda at, count: os.pread(handle, count, file.offset + at),
                close=lambda: os.close(handle),
            )
        )
    if isinstance(file, RemoteFile):
        return open_remote(file, keep=not header)
    return os.fdopen(_open(file), "rb")


def opened_media(kind: str, file: MediaFile, *, where: str, header: bool = False) -> BinaryIO:
    """The file's bytes as of open_media_file; ValueError with ``where`` if it cannot be opened."""
    try:
        return open_media_file(file, header=header)
    except OSError as error:
        raise unreadable(kind, file, error, where=where) from error


def unreadable(kind: str, file: MediaFile, error: OSError, *, where: str) -> ValueError:
    """What to tell users of an ``image``, ``video`` or ``audio`` that could not be opened."""
    if isinstance(error, FileNotFoundError):
        return ValueError(
            f"{where}: no {kind} file at {file}: relative paths start at the JSONL file's folder or"
            " at --media-root."
        )
    return ValueError(f"{where}: {kind} {file} cannot be opened: {error}.")


def _open(file: MediaFile) -> int:
    """A descriptor of the file, or of the archive that it is in; OSError as of open_media_file."""
    path = os.fspath(file_on_disk(file))
    try:
        _require_plain(os.stat(path).st_mode)
        # Another one may have taken its place since: this flag keeps a pipe from hanging.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # a name that no file can have, say with a zero byte
        raise OSError(str(error)) from error
    try:
        _require_plain(os.fstat(handle).st_mode)
        if isinstance(file, ConfinedFile):
            # The system says where the opened file lies: nothing can change between check and use.
            real = os.readlink(f"/proc/self/fd/{handle}")
            if not real.startswith(os.path.join(file.folder, "")):
                raise OSError(
                    f"it is {real}, and --confine-media takes only what lies in {file.folder}"
                )
    except OSError:
        os.close(handle)
        raise
    return handle


def _require_plain(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError("it is not a plain file, but a folder, a pipe, a socket or a device")
