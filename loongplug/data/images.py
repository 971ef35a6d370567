"""From image files to patches, and an image's patch grid from the file's header alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from loongplug.data.cache import ByteBoundedCache
from loongplug.data.microbatch import VisionInput
from loongplug.data.positions import Grid
from loongplug.data.processor import Processor

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


def image_grid(path: Path, processor: Processor, *, where: str) -> Grid:
    """The patch grid that the image processor will make of this file; reads its header only."""
    with _opened(path, where=where) as image:
        width, height = image.size
        if _orientation(image) in _TURNS_THAT_SWAP_SIDES:
            width, height = height, width
    size = processor.image_processor.size
    patch = processor.patch_size
    try:
        height, width = smart_resize(
            height,
            width,
            factor=patch * processor.spatial_merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
    except ValueError as error:
        raise ValueError(f"{where}: image {path} cannot be used: {error}.") from error
    return 1, height // patch, width // patch


def image_tokens(grid: Grid, processor: Processor) -> int:
    """How many tokens an image of this grid takes in the text."""
    time, height, width = grid
    return time * height * width // processor.spatial_merge_size**2


class ImageLoader:
    """Image files to one microbatch's pixels, with a bounded cache of processed images.

    All images that are not in the cache go through the image processor in one call, which
    takes less than half the time of one call each. A file that changes is processed anew.
    """

    def __init__(self, processor: Processor, *, cache_bytes: int = 256 * 2**20) -> None:
        self._processor = processor
        self._cache: ByteBoundedCache[_FileVersion, _Image] = ByteBoundedCache(cache_bytes)

    def load(self, paths: Sequence[Path], *, where: str) -> VisionInput:
        """The images in order; none give the zero-length unit.

        Raises ValueError, with ``where``, for a file that is missing, damaged or no image.
        """
        if not paths:
            return VisionInput(
                pixels=torch.zeros(0, self._processor.patch_dim),
                grid_thw=torch.zeros(0, 3, dtype=torch.int64),
            )
        versions = [_file_version(path, where=where) for path in paths]
        images = {version: image for version in versions if (image := self._cache.get(version))}
        missing = list(dict.fromkeys(version for version in versions if version not in images))
        for version, image in zip(missing, self._process(missing, where=where), strict=True):
            images[version] = image
            self._cache.put(version, image, size=image.pixels.nbytes)
        ordered = [images[version] for version in versions]
        return VisionInput(
            pixels=torch.cat([image.pixels for image in ordered]),  # [patches, patch_dim]
            grid_thw=torch.tensor([image.grid for image in ordered]),  # [images, 3]
        )

    def _process(self, versions: Sequence["_FileVersion"], *, where: str) -> list["_Image"]:
        if not versions:
            return []
        decoded = [_decode(version.path, where=where) for version in versions]
        features = self._processor.image_processor(images=decoded, return_tensors="pt")
        grids = features["image_grid_thw"]
        pixels = features["pixel_values"].split(grids.prod(dim=-1).tolist())
        return [
            # A view would keep the whole call's pixels alive.
            _Image(pixels=part.clone(), grid=tuple(grid))
            for part, grid in zip(pixels, grids.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class _FileVersion:
    path: Path
    modified_ns: int
    size: int


@dataclass(frozen=True)
class _Image:
    pixels: Tensor  # [patches, patch_dim] float32
    grid: Grid


def _file_version(path: Path, *, where: str) -> _FileVersion:
    try:
        state = path.stat()
    except OSError as error:
        raise _unreadable(path, error, where=where) from error
    return _FileVersion(path, modified_ns=state.st_mtime_ns, size=state.st_size)


def _decode(path: Path, *, where: str) -> Image.Image:
    with _opened(path, where=where) as image:
        turn = _TURN_UPRIGHT.get(_orientation(image))
        upright = image.convert("RGB")
    return upright if turn is None else upright.transpose(turn)


@contextmanager
def _opened(path: Path, *, where: str) -> Iterator[Image.Image]:
    """The image, its pixels still to be read; what Pillow raises then says ``where``, too."""
    try:
        image = Image.open(path)
    except UnidentifiedImageError as error:
        raise ValueError(f"{where}: {path} is no image that Pillow can read.") from error
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"{where}: image {path} has too many pixels ({error}): make it smaller."
        ) from error
    except OSError as error:
        raise _unreadable(path, error, where=where) from error
    except ValueError as error:  # a PNG's text that unpacks to too much
        raise _damaged(path, error, where=where) from error
    try:
        with image:
            yield image
    except (OSError, SyntaxError, ValueError) as error:  # SyntaxError: of a PNG's chunks, of EXIF
        raise _damaged(path, error, where=where) from error


def _damaged(path: Path, error: Exception, *, where: str) -> ValueError:
    return ValueError(f"{where}: image {path} is damaged ({error}): replace the file.")


def _unreadable(path: Path, error: OSError, *, where: str) -> ValueError:
    if isinstance(error, FileNotFoundError):
        return ValueError(
            f"{where}: no image file at {path}: relative paths start at the JSONL file's folder."
        )
    return ValueError(f"{where}: image {path} cannot be opened: {error}.")


def _orientation(image: Image.Image) -> int:
    # Asking a PNG for EXIF data it has not met yet decodes the whole file.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(_EXIF_ORIENTATION, 1))
