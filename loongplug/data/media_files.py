"""Files of images and videos: files of their own, or members of a tar archive."""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol


@dataclass(frozen=True)
class TarMember:
    """A file within an uncompressed tar archive, by the place of its bytes there."""

    archive: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.archive}:{self.name}"


MediaFile = Path | TarMember


class MediaRoot(Protocol):
    """What the names of media in a row start at: a folder, or the files beside the row."""

    def __truediv__(self, name: str, /) -> MediaFile:
        """The file of this name; ValueError where it is known that there is none."""
        ...


def read_head(file: MediaFile, count: int) -> bytes:
    """At most ``count`` bytes from the file's beginning, without a buffer; OSError as of open."""
    start = 0
    if isinstance(file, TarMember):
        start, count = file.offset, min(count, file.size)
    handle = os.open(file_on_disk(file), os.O_RDONLY)
    try:
        return os.pread(handle, count, start)
    finally:
        os.close(handle)


def file_on_disk(file: MediaFile) -> Path:
    """The file itself, or the archive that it is in."""
    return file.archive if isinstance(file, TarMember) else file


def open_media_file(file: MediaFile) -> BinaryIO:
    """The file's bytes, to be closed by the caller; of a member, no others can be reached."""
    if isinstance(file, TarMember):
        return io.BufferedReader(_MemberReader(file))
    return file.open("rb")


class _MemberReader(io.RawIOBase):
    """The bytes of a tar member as a file that can be read and sought in."""

    def __init__(self, member: TarMember) -> None:
        super().__init__()
        self._member = member
        self._position = 0
        self._handle = os.open(member.archive, os.O_RDONLY)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of files."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._member.size}
        position = start[whence] + offset
        if position < 0:
            raise OSError(f"sought to {position}, before the beginning")
        self._position = position
        return position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """As of files."""
        left = max(0, self._member.size - self._position)
        found = os.pread(self._handle, min(len(buffer), left), self._member.offset + self._position)
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def close(self) -> None:
        """As of files."""
        if not self.closed:
            os.close(self._handle)
        super().close()
