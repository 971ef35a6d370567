"""Files on object stores: what their URLs name, and their bytes, of which copies are kept here.

Read-only, by s3fs, which the extra ``s3`` installs. A URL is never handed to a library that would
choose a protocol by it: whatever it says, it is a bucket and a key of S3.
"""

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from loongplug.data.cache_folder import LOG, alone, user_cache
from loongplug.output_files import put_whole

SCHEME = "s3://"
Version = tuple[int, str]  # size in bytes and tag of a file, as the store says them
_BUFFER = 64 * 2**10  # bytes of one request, where a file is read piece by piece
_CHUNK = 64 * 2**20  # bytes of one request, where a file is copied
_BUCKET = re.compile(r"[a-zA-Z0-9._-]{1,255}")
_SAID_LATER = "403"  # what S3 answers where it is asked for no content, and cannot say why


class DataSourceError(ValueError):
    """A store or a file of rows cannot be read any more: no sample's fault, so it ends a run."""


class StoreError(DataSourceError):
    """The store cannot be asked: no sample's fault, and ranks may differ, so it ends a run."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on S3; with ``folder``, one that is opened only if it lies in there."""

    url: str
    folder: str | None = None

    @classmethod
    def named(cls, url: str, *, folder: str | None = None) -> "RemoteFile":
        """The file of this URL, whose steps ``.`` and ``..`` are taken as in a path."""
        steps: list[str] = []
        for step in url.removeprefix(SCHEME).split("/"):
            if step == ".." and len(steps) > 1 and steps[-1] != "..":  # the bucket stays
                steps.pop()
            elif step != ".":
                steps.append(step)
        return cls(SCHEME + "/".join(steps), folder)

    def __str__(self) -> str:
        return self.url

    @property
    def parent(self) -> str:
        return self.url.rpartition("/")[0]


def remote_version(file: RemoteFile) -> Version:
    """What the store has now: another one once the file is written again; see open_remote."""
    with _asking(file) as store:
        return _version(store.info(file.url, refresh=True))


def open_remote(file: RemoteFile, *, keep: bool) -> BinaryIO:
    """The file's bytes as they are now: of a copy that was kept, or with ``keep`` is; or by pieces.

    OSError for a file that is not there, may not be read or lies elsewhere; else StoreError.
    """
    opened, version = _opened(file)
    place = _place(file, version)
    size, _ = version
    try:
        if _is_kept(place, size):
            return place.open("rb")
        if keep:
            _copy(file, opened, place)
            return place.open("rb")
    except OSError as error:  # the next best is to keep nothing
        reason = error.strerror or type(error).__name__
        _say_once(f"Files of {SCHEME} are not kept: {reason}.")

    def read_at(offset: int, count: int) -> bytes:
        with _asking(file):
            opened.seek(offset)
            found: bytes = opened.read(count)
        return found

    return io.BufferedReader(RangeReader(size, read_at), _BUFFER)


def data_copy(file: RemoteFile) -> Path:
    """A copy of a data file, which one process makes; ValueError if it cannot be read or kept."""
    try:
        opened, version = _opened(file)
        place = _place(file, version)
    except FileNotFoundError as error:
        raise ValueError(
            f"No data file at {file}: expected {SCHEME}BUCKET/KEY of one file; folders are not"
            " read from there."
        ) from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error
    size = f"{version[0] / 2**20:.1f} MiB"
    try:
        with alone(place.parent):
            if not _is_kept(place, version[0]):
                LOG.warning("%s is copied once, %s, to %s.", file, size, place)
                _copy(file, opened, place)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be copied to {place.parent} ({error}): that takes {size} once;"
            " XDG_CACHE_HOME sets another folder."
        ) from error
    return place


def _opened(file: RemoteFile) -> tuple[Any, Version]:
    """The file to be read from by ranges of this version alone."""
    with _asking(file) as store:
        opened = store.open(file.url, "rb", cache_type="none")
        return opened, _version(opened.details)


def _version(details: dict[str, Any]) -> Version:
    if details["type"] != "file":
        raise FileNotFoundError(f"{details['name']} is a folder")
    return int(details["size"]), f"{details.get('ETag')} {details.get('LastModified')}"


def _place(file: RemoteFile, version: Version) -> Path:
    """Where this version is kept; makes the folder, for this user alone: buckets are private."""
    words = "\n".join((file.url, *map(str, version)))
    name = sha256(words.encode()).hexdigest()[:32]
    folder = user_cache() / "s3" / name[:2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.parent.chmod(0o700)
    except OSError as error:
        _say_once(f"Files of {SCHEME} cannot be kept in {folder}: {error.strerror}.")
    # The end of the name tells people what it is, and readers what is in it.
    return folder / f"{name}-{file.url.rpartition('/')[2][-40:]}"


def _is_kept(place: Path, size: int) -> bool:
    return place.is_file() and place.stat().st_size == size


@cache  # once in a process, however many files there are
def _say_once(message: str) -> None:
    LOG.warning("%s", message)


def _copy(file: RemoteFile, opened: Any, place: Path) -> None:
    """Put the file there whole; OSError of the disk, or where the file is another one by now."""
    with put_whole(place) as whole, whole.open("wb") as copy:
        while True:
            with _asking(file):
                piece = opened.read(_CHUNK)
            if not piece:
                break
            copy.write(piece)


class RangeReader(io.RawIOBase):
    """A file of ``size`` bytes, of which ``read_at(offset, count)`` gives some."""

    def __init__(
        self,
        size: int,
        read_at: Callable[[int, int], bytes],
        *,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._size = size
        self._read_at = read_at
        self._close = close
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        position = start[whence] + offset
        if position < 0:
            raise OSError(f"sought to {position}, before the beginning")
        self._position = position
        return position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        left = max(0, self._size - self._position)
        found = self._read_at(self._position, min(len(buffer), left))
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def close(self) -> None:
        if not self.closed:
            self._close()
        super().close()


@contextmanager
def _asking(file: RemoteFile) -> Iterator[Any]:
    """The store, whose errors within become those of open_remote."""
    bucket, _, key = file.url.removeprefix(SCHEME).partition("/")
    if not _BUCKET.fullmatch(bucket) or not key or ".." in key.split("/"):
        raise OSError(f"it is not {SCHEME}BUCKET/KEY")
    if len(key.encode()) > 1024:  # S3's own bound: stores answer as if they were ill
        raise OSError("its name is longer than 1,024 bytes: Base64 begins with data:")
    if file.folder is not None and not file.url.startswith(f"{file.folder}/"):
        raise OSError(f"it is {file}, and --confine-media takes only what lies in {file.folder}")
    store = _store(os.getpid())
    try:
        yield store
    except Exception as error:
        raise _as_told(file, error, store) from error


def _as_told(file: RemoteFile, error: Exception, store: Any) -> Exception:
    """An OSError for what the store says of this file, a StoreError for all else."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(str(error))
    code = _code(error)
    if code == _SAID_LATER:
        try:
            store.cat_file(file.url, start=0, end=1)
        except Exception as later:
            code, error = _code(later), later
    reason = str(error) or type(error).__name__
    if code in _OF_THE_FILE or type(error).__name__ == "FileExpired":
        return OSError(f"{reason} ({code})" if code else reason)
    return StoreError(
        f"{file} cannot be read ({type(error).__name__}: {reason}): look at the network, at"
        " AWS_ENDPOINT_URL, and at the credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and"
        " AWS_SECRET_ACCESS_KEY)."
    )


# What S3 answers of a file or a bucket that is named, to whoever asks with these credentials.
# They are said of archived files, of empty ones (the range), and of one that changed since it was
# opened (the precondition; FileExpired where s3fs sees it).
_OF_THE_FILE = {
    *("AccessDenied", "AllAccessDisabled", "InvalidObjectState", "InvalidRange"),
    *("KeyTooLongError", "PreconditionFailed"),
}


def _code(error: BaseException) -> str | None:
    """S3's own word for what is wrong, which s3fs keeps behind its exception."""
    answer = getattr(error.__cause__ or error, "response", None)
    return str(answer["Error"].get("Code")) if isinstance(answer, dict) else None


@cache  # a forked process has its own: it has neither the thread nor the connections of the first
def _store(process: int) -> Any:
    """S3 as the environment and its files of credentials say; no listing is remembered."""
    try:
        from s3fs import S3FileSystem
    except ImportError as error:
        raise StoreError(
            f"Files of {SCHEME} are read by s3fs, which is not installed: pip install"
            " 'loongplug[s3]'."
        ) from error
    return S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


def file_named(name: str | Path) -> Path | RemoteFile:
    return RemoteFile.named(str(name)) if str(name).startswith(SCHEME) else Path(name)
