"""Images to rows of patches: by Qwen's processors, or by one that makes all images one size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    GotOcr2ImageProcessorPil,
    LlavaImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from loongplug.data.folder_files import whole_number
from loongplug.data.pixel_limits import PixelLimits
from loongplug.data.positions import Grid

if TYPE_CHECKING:
    from torch import Tensor

    from loongplug.data.pixel_bytes import PixelBytes

_CHANNELS = 3
_MOST_RATIO = 200  # of an image's sides, as Qwen's processors have it
_MOST_PADDED = 178_956_970  # pixels of a padded image, as many as an image may have


@dataclass(frozen=True, kw_only=True)
class PatchSizes:
    """How a model cuts images: sides of a patch in pixels, and of a visual token in patches.

    ``image_size`` is the side in pixels that every image has; None where each has its own, or
    where that is not said.
    """

    patch_size: int
    spatial_merge_size: int = 1
    image_size: int | None = None

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> PatchSizes | None:
        """By a model's config.json; None where it does not say, ValueError for what are none."""
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping) or vision.get("patch_size") is None:
            return None
        ratio = config.get("downsample_ratio", 1)  # InternVL: tokens to a patch, by side
        if type(ratio) not in (int, float) or not 0 < ratio <= 1:
            raise ValueError(f"downsample_ratio is {ratio!r:.40}: expected above 0, up to 1")
        said = {"spatial_merge_size": round(1 / ratio), **vision}  # Qwen's say it themselves
        names = ("patch_size", "spatial_merge_size", "image_size")
        return cls(**{name: whole_number(said[name], name) for name in names if said.get(name)})


class ImagePatches(ABC):
    """An image processor of transformers, and how what it makes becomes rows of patches.

    The rows of a frame are ordered by merge block: all patches that become one visual token stand
    together, blocks row by row. A row has the patch's values by channel, time, row and column.
    """

    transform: Any  # the image processor; always the Pillow one
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int

    @property
    def patch_dim(self) -> int:
        """Values of a row: channels * temporal * patch * patch."""
        return _CHANNELS * self.temporal_patch_size * self.patch_size**2

    @abstractmethod
    def grid(self, height: int, width: int) -> Grid:
        """What becomes of an image of this size; ValueError for one that cannot be used."""

    @abstractmethod
    def coded(self, images: Sequence[Image.Image]) -> list[tuple[Tensor, Grid]]:
        """Of each image in RGB its rows as bytes, for :attr:`pixel_bytes`, and their grid."""

    @cached_property
    def pixel_bytes(self) -> PixelBytes:
        """What becomes of rows of bytes."""
        from loongplug.data.pixel_bytes import PixelBytes

        return PixelBytes.of(self.transform, frames=self.temporal_patch_size)

    def _transformed(self, transform: Any, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """What the processor makes of bytes, but for the scale of their values."""
        made: dict[str, Tensor] = transform(
            images=list(images), return_tensors="pt", do_rescale=False, do_normalize=False
        )
        assert str(made["pixel_values"].dtype) == "torch.uint8", made["pixel_values"].dtype
        return made

    @abstractmethod
    def model_inputs(self, pixels: Tensor, grid_thw: Tensor) -> dict[str, Tensor]:
        """What the model in transformers is given, of the rows of images one after the other.

        ``pixels`` are [patches, patch_dim], ``grid_thw`` [images, 3].
        """


class QwenPatches(ImagePatches):
    """Images keep their shape, and nearly their size, between limits; Qwen's VL families."""

    def __init__(self, transform: Qwen2VLImageProcessorPil) -> None:
        self.transform = transform
        self.patch_size = transform.patch_size
        self.temporal_patch_size = transform.temporal_patch_size
        self.spatial_merge_size = transform.merge_size

    def grid(self, height: int, width: int) -> Grid:
        size, patch = self.transform.size, self.patch_size
        height, width = smart_resize(
            height,
            width,
            factor=patch * self.spatial_merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        return 1, height // patch, width // patch

    def coded(self, images: Sequence[Image.Image]) -> list[tuple[Tensor, Grid]]:
        from loongplug.data.pixel_bytes import cut_once

        transform = copy(self.transform)
        transform.patchify = cut_once  # transformers' repeats frames, in float32
        features = self._transformed(transform, images)
        grids = features["image_grid_thw"]
        pixels = features["pixel_values"].split(grids.prod(dim=-1).tolist())
        # A view would keep the whole call's pixels alive.
        return [
            (part.clone(), tuple(grid)) for part, grid in zip(pixels, grids.tolist(), strict=True)
        ]

    def model_inputs(self, pixels: Tensor, grid_thw: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": pixels, "image_grid_thw": grid_thw}


class FixedPatches(ImagePatches):
    """Every image becomes one frame of the same size, or several such tiles (InternVL).

    A grid's time counts the tiles; each is a picture of its own. What is left of a frame's height
    and width beside whole patches is dropped, as a convolution drops it.
    """

    temporal_patch_size = 1

    def __init__(self, transform: Any, sizes: PatchSizes) -> None:
        """ValueError where images are not of one size: the model's, and of whole visual tokens."""
        self.transform = transform
        self.patch_size = sizes.patch_size
        self.spatial_merge_size = sizes.spatial_merge_size
        self.size = _size_of_frames(transform)  # height, width in pixels
        self._rows, self._columns = (side // self.patch_size for side in self.size)
        merge, patch, model = self.spatial_merge_size, self.patch_size, sizes.image_size
        wrong = ""
        if model not in (None, *self.size):
            wrong = f"but the model takes {model} x {model}"
        elif not self._rows or not self._columns or self._rows % merge or self._columns % merge:
            wrong = f"which are not whole visual tokens of {merge} x {merge} patches of {patch} x"
            wrong += f" {patch} pixels"
        if wrong:
            raise ValueError(
                f"it makes images of {self.size[0]} x {self.size[1]} pixels, {wrong}: put in the"
                " one that belongs to this model"
            )

    def grid(self, height: int, width: int) -> Grid:
        transform = self.transform
        pads = bool(getattr(transform, "do_pad", False))
        if pads or transform.size.get("shortest_edge"):  # else nothing grows with the ratio
            ratio = max(height, width) / min(height, width)
            if ratio > _MOST_RATIO:
                raise ValueError(
                    f"one side is {ratio:.0f} times the other, where {_MOST_RATIO} is the most"
                )
        if pads and max(height, width) ** 2 > _MOST_PADDED:
            raise ValueError(
                f"padded to a square, it has more than {_MOST_PADDED} pixels: make it smaller"
            )
        tiles = 1
        if isinstance(transform, GotOcr2ImageProcessorPil):
            tiles = transform.get_number_of_image_patches(height, width)
        return tiles, self._rows, self._columns

    def coded(self, images: Sequence[Image.Image]) -> list[tuple[Tensor, Grid]]:
        from loongplug.data.pixel_bytes import cut

        grids = [self.grid(image.height, image.width) for image in images]
        # [frames, channels, height, width]
        frames = self._transformed(self.transform, images)["pixel_values"]
        counts = [tiles for tiles, _, _ in grids]
        assert frames.shape == (sum(counts), _CHANNELS, *self.size), (frames.shape, grids)
        made = frames.split(counts)
        size = {"patch": self.patch_size, "merge": self.spatial_merge_size}
        return [(cut(part, **size), grid) for part, grid in zip(made, grids, strict=True)]

    def model_inputs(self, pixels: Tensor, grid_thw: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": self.frames(pixels)}

    def frames(self, pixels: Tensor) -> Tensor:
        """The frames [frames, channels, height, width] of rows; zero beside whole patches."""
        patch, merge = self.patch_size, self.spatial_merge_size
        blocks = self._rows // merge, self._columns // merge
        rows = pixels.reshape(-1, *blocks, merge, merge, _CHANNELS, patch, patch)
        whole = rows.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(
            -1, _CHANNELS, self._rows * patch, self._columns * patch
        )
        frames = pixels.new_zeros(len(whole), _CHANNELS, *self.size)
        frames[:, :, : whole.shape[2], : whole.shape[3]] = whole
        return frames


_FIXED: Mapping[str, Any] = {
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "SiglipImageProcessor": SiglipImageProcessorPil,
    "LlavaImageProcessor": LlavaImageProcessorPil,
    "GotOcr2ImageProcessor": GotOcr2ImageProcessorPil,  # InternVL's
}


def processor_kind(name: Any) -> Any:
    """The class for an ``image_processor_type``, always Pillow's; Qwen's where there is none."""
    plain = str(name or "Qwen").removesuffix("Fast").removesuffix("Pil")
    if plain.startswith("Qwen"):
        return Qwen2VLImageProcessorPil
    if plain not in _FIXED:
        raise ValueError(
            f"image_processor_type {name!r:.80}, where one of Qwen2VLImageProcessor,"
            f" {', '.join(_FIXED)} was expected: models with other processors cannot be trained"
        )
    return _FIXED[plain]


def limited(patches: ImagePatches, limits: PixelLimits) -> None:
    """Give the processor these limits; ValueError where they leave no size, or it has one alone."""
    if isinstance(patches, FixedPatches):
        if (limits.min_pixels, limits.max_pixels) != (None, None):
            height, width = patches.size
            raise ValueError(
                "--min-pixels and --max-pixels are for models whose images keep their own sizes,"
                f" but this model's image processor makes all {height} x {width} pixels: leave"
                " them out."
            )
        return
    token = patches.patch_size * patches.spatial_merge_size
    limits.limit(patches.transform, patch=token**2)


def _size_of_frames(transform: Any) -> tuple[int, int]:
    """Height and width of all that the processor makes."""
    pads = bool(getattr(transform, "do_pad", False))
    if pads and not isinstance(transform, LlavaImageProcessorPil):
        raise ValueError("do_pad, which this class does behind all else: leave it out")
    crops = bool(getattr(transform, "do_center_crop", False))
    resized = (transform.size if transform.do_resize else None) or {}
    size = transform.crop_size if crops else resized
    square = size.get("shortest_edge") if pads and not crops else None
    height: Any = square or size.get("height")
    width: Any = square or size.get("width")
    if not all(type(side) is int and 0 < side <= 2**14 for side in (height, width)):
        raise ValueError(
            f"size {transform.size} and crop_size {getattr(transform, 'crop_size', None)}, which"
            " do not make all images one size: copy the file from the model that it belongs to"
        )
    return height, width
