"""From image files to patches, and an image's patch grid from the file's header alone."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

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
    """The patch grid that ``load_images`` will make of this file; reads its header only."""
    with _open(path, where=where) as image:
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


def load_images(paths: Sequence[Path], processor: Processor, *, where: str) -> VisionInput:
    """Decode and process all images in one call, in order.

    One call for many images costs a third of one call each. No paths give the zero-length
    unit. Raises ValueError for a file that is missing or no image.
    """
    if not paths:
        return VisionInput(
            pixels=torch.zeros(0, processor.patch_dim),
            grid_thw=torch.zeros(0, 3, dtype=torch.int64),
        )
    images = [_decode(path, where=where) for path in paths]
    features = processor.image_processor(images=images, return_tensors="pt")
    return VisionInput(
        pixels=features["pixel_values"],  # [patches, patch_dim]
        grid_thw=features["image_grid_thw"],  # [images, 3]
    )


def _decode(path: Path, *, where: str) -> Image.Image:
    with _open(path, where=where) as image:
        turn = _TURN_UPRIGHT.get(_orientation(image))
        try:
            upright = image.convert("RGB")
        except OSError as error:
            raise ValueError(
                f"{where}: image {path} is damaged ({error}): replace the file."
            ) from error
    return upright if turn is None else upright.transpose(turn)


def _open(path: Path, *, where: str) -> Image.Image:
    try:
        return Image.open(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"{where}: no image file at {path}: relative paths start at the JSONL file's folder."
        ) from error
    except UnidentifiedImageError as error:
        raise ValueError(f"{where}: {path} is no image that Pillow can read.") from error
    except OSError as error:
        raise ValueError(f"{where}: image {path} cannot be opened: {error}.") from error


def _orientation(image: Image.Image) -> int:
    # Asking a PNG for EXIF data it has not met yet decodes the whole file.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(_EXIF_ORIENTATION, 1))
