"""Image files: their size and patch grid from the header alone, and their pixels."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from loongplug.data.media_files import (
    InlineFile,
    MediaFile,
    TarMember,
    file_on_disk,
    opened_media,
    unreadable,
)
from loongplug.data.object_store import RemoteFile, StoreError, remote_version
from loongplug.data.pixel_limits import Transparency

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
        except StoreError:
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
    """In 8 bits per colour, without transparency, as image processors of transformers do it.

    But for grey of 16 bits, which Pillow would clip at 255: 0 to 65,535 become 0 to 255.
    """
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
