"""Files of media: files of their own, members of a tar archive, or within a row; images in them.

Rows name them, so nothing is opened but plain files: a pipe would hang, a device may do something.
"""

import base64
import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from loongplug.data.data_options import Transparency
from loongplug.data.object_store import (
    SCHEME,
    DataSourceError,
    RangeReader,
    RemoteFile,
    open_remote,
    remote_version,
)

# All formats that are opened. Of Pillow's others, some start programs (EPS), few hold pictures.
# The most common come first: Pillow tries them in this order.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF")
_BITS_PER_SAMPLE = 258  # a TIFF tag
_EXIF_ORIENTATION = 0x0112
_TURN_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_TURNS_THAT_SWAP_SIDES = (5, 6, 7, 8)


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


def media_named(name: str | InlineFile, root: MediaRoot) -> MediaFile:
    """The file that a row names or holds; a plain folder knows no URLs, other roots say."""
    if isinstance(name, InlineFile):
        return name
    return RemoteFile.named(name) if isinstance(root, Path) and is_remote(name) else root / name


def file_on_disk(file: MediaFile) -> Path:
    """The file itself, or the archive that it is in; of one within a row or far away is none."""
    assert not isinstance(file, InlineFile | RemoteFile)
    if isinstance(file, TarMember):
        return file.archive
    return file.path if isinstance(file, ConfinedFile) else file


def open_media_file(file: MediaFile, *, header: bool = False) -> BinaryIO:
    """The file's bytes, to be closed by the caller; of a member, no others can be reached.

    Of a file on an object store no more than the ``header`` is fetched, or all, which is kept.
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


def image_size(path: MediaFile, *, where: str) -> tuple[int, int]:
    """Height and width of the image once it is upright; reads the file's header only."""
    with _opened(path, where=where, header=True) as image:
        width, height = image.size
        if _orientation(image) in _TURNS_THAT_SWAP_SIDES:
            width, height = height, width
    return height, width


def decode_image(
    path: MediaFile, *, where: str, transparency: Transparency = "white"
) -> Image.Image:
    """The image, upright and in RGB; ValueError for a file that is missing or damaged."""
    with _opened(path, where=where) as image:
        turn = _TURN_UPRIGHT.get(_orientation(image))
        upright = _in_rgb(image, transparency)
    return upright if turn is None else upright.transpose(turn)


def file_version(path: MediaFile, *, where: str, kind: str) -> tuple[object, int | str, int]:
    """The file, or its digest, its last change and its size; ValueError for no file of a kind."""
    if isinstance(path, InlineFile):
        return hashlib.sha256(path.content).digest(), 0, len(path.content)
    try:
        if isinstance(path, RemoteFile):
            size, tag = remote_version(path)
            return path, tag, size
        state = file_on_disk(path).stat()
    except OSError as error:
        raise unreadable(kind, path, error, where=where) from error
    return path, state.st_mtime_ns, path.size if isinstance(path, TarMember) else state.st_size


@contextmanager
def _opened(path: MediaFile, *, where: str, header: bool = False) -> Iterator[Image.Image]:
    """The image, its pixels still to be read; what Pillow raises then says ``where``, too."""
    with opened_media("image", path, where=where, header=header) as source:
        try:
            with Image.open(source, formats=FORMATS) as image:
                depth = _unknown_range(image)
                if depth is None:
                    yield image
        except UnidentifiedImageError as error:
            raise ValueError(
                f"{where}: {path} is not an image in a format that is read ({', '.join(FORMATS)}), "
                "or its header is damaged: convert it, or replace the file."
            ) from error
        except Image.DecompressionBombError as error:
            raise ValueError(
                f"{where}: image {path} has too many pixels ({error}): make it smaller."
            ) from error
        except DataSourceError:
            raise
        # Decoders raise any kind for damaged files: SyntaxError, struct.error, MemoryError.
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise ValueError(
                f"{where}: image {path} is damaged ({reason}): replace the file."
            ) from error
    if depth is not None:
        raise ValueError(
            f"{where}: image {path} has pixels of {depth}, and nothing says how bright they"
            " are: save it with 8 or 16 bits."
        )


def _unknown_range(image: Image.Image) -> str | None:
    """What the pixels are of an image that Pillow would clip, and whose range is not known."""
    if image.mode == "F":
        return "floating point numbers"
    if isinstance(image, TiffImageFile) and image.mode.startswith("I"):
        bits = image.tag_v2[_BITS_PER_SAMPLE]
        if image.mode == "I" or bits != (16,):
            return "12 or 32 bits, or with a sign"
    return None


def _in_rgb(image: Image.Image, transparency: Transparency) -> Image.Image:
    """In 8 bits per colour, without transparency; grey of 16 bits is scaled, where Pillow clips."""
    ground, hidden = transparency == "white", image.info.get("transparency")
    if image.mode.startswith("I"):
        wide = np.asarray(image).astype(np.uint32)
        grey = ((wide + 128) // 257).astype(np.uint8)
        if ground and hidden is not None:  # the one value that is transparent
            grey[wide == hidden] = 255
        image = Image.fromarray(grey)
    elif ground and ("A" in image.getbands() or hidden is not None):
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":  # Pillow turns these itself, and tells the upright size
        return 1
    # Asking a PNG for EXIF data it has not met yet decodes the whole file.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(_EXIF_ORIENTATION, 1))


def version(path: Path) -> tuple[int, int]:
    """Size and time of change: equal to itself later only while nothing has written to the file."""
    state = path.stat()
    return state.st_size, state.st_mtime_ns


class ChangedFileError(DataSourceError):
    """A file of rows is another one than at the start: that ends a run, it is no bad sample."""


def require_version(path: Path, expected: tuple[int, int]) -> None:
    """Raise ChangedFileError, alike for each row, where the file is not of this version."""
    if not path.exists() or version(path) != expected:
        raise ChangedFileError(
            f"{path} has changed since the start of this run, which no longer knows where its rows "
            "are: start the run again, and leave its data as they are."
        )


def is_remote(name: str | Path) -> bool:
    """Whether this names something on an object store."""
    return isinstance(name, str) and name.startswith(SCHEME)
