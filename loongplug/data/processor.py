"""Processors of a model's folder: its tokenizer and what cuts its images to rows of patches."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import (
    GotOcr2ImageProcessorPil,
    LlavaImageProcessorPil,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from loongplug.data.audio_frames import AudioFrames
from loongplug.data.data_options import PixelLimits, Transparency
from loongplug.data.media_sizes import PatchSizes
from loongplug.data.sample import Grid

if TYPE_CHECKING:
    from torch import Tensor

_CHANNELS = 3
_MOST_RATIO = 200  # of an image's sides, as Qwen's processors have it
_MOST_PADDED = 178_956_970  # pixels of a padded image, as many as an image may have
MultiTurn = Literal["split", "last"]


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
        """Of each image in RGB its rows as bytes, and their grid."""

    def _transformed(self, transform: Any, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """What the processor makes of bytes, but for the scale of their values."""
        made: dict[str, Tensor] = transform(
            images=list(images), return_tensors="pt", do_rescale=False, do_normalize=False
        )
        assert str(made["pixel_values"].dtype) == "torch.uint8", made["pixel_values"].dtype
        return made

    @abstractmethod
    def model_inputs(self, pixels: Tensor, grid_thw: Tensor) -> dict[str, Tensor]:
        """What the model in transformers is given, of the rows of images one after the other."""


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

    A grid's time counts the tiles. What a frame has beside whole patches is dropped.
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


def cut(frames: Tensor, *, patch: int, merge: int) -> Tensor:
    """Rows [patches, channels * patch * patch] of frames [frames, channels, height, width]."""
    count, channels, height, width = frames.shape
    rows, columns = height // patch, width // patch
    sizes: Sequence[int] = (rows // merge, merge, patch, columns // merge, merge, patch)
    pieces = frames[:, :, : rows * patch, : columns * patch].reshape(count, channels, *sizes)
    # [frames, block rows, block columns, merge, merge, channels, patch, patch]
    return pieces.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * patch * patch)


def cut_once(
    image: NDArray[np.uint8], *, patch_size: int, merge_size: int, temporal_patch_size: int
) -> tuple[NDArray[np.uint8], int, int]:
    """Qwen's rows of an image [channels, height, width], with its frame once, and their grid."""
    import torch

    rows = cut(torch.from_numpy(image)[None], patch=patch_size, merge=merge_size)
    return rows.numpy(), image.shape[1] // patch_size, image.shape[2] // patch_size


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What turns a conversation into tokens, patches and frames, with the ids that both share.

    ``tokens`` are those that hold the places of media or mark them, and ``token_ids`` their ids, by
    the names of fields of models. A kind of media without one (``video_token_id``) is not taken.
    """

    tokenizer: PreTrainedTokenizerBase
    images: ImagePatches | None  # None: a folder for sounds and text
    folder: Path
    tokens: Mapping[str, str]
    token_ids: Mapping[str, int]
    special_texts: SpecialTexts | None  # what is text in a row's text; None: none of it
    multi_turn: MultiTurn  # where the template renders earlier turns differently
    trains_thoughts: bool  # that the template puts before an answer
    end_token: str
    end_token_id: int
    pad_token_id: int
    vocab_size: int  # one more than the highest id; a model may pad beyond it
    pixel_limits: PixelLimits
    transparency: Transparency
    audio: AudioFrames | None = None  # None: a folder without sounds

    @property
    def vision(self) -> ImagePatches:
        """What cuts images, in a folder that has it."""
        assert self.images is not None, "opening refuses images"
        return self.images

    @property
    def hearing(self) -> AudioFrames:
        """What cuts sounds, in a folder that has it."""
        assert self.audio is not None, "opening refuses sounds"
        return self.audio

    def places(self, *kinds: str) -> tuple[int, ...]:
        """Ids of the tokens that hold the places of media of these kinds."""
        names = (f"{kind}_token_id" for kind in kinds)
        return tuple(self.token_ids[name] for name in names if name in self.token_ids)

    def around(self, name: str) -> tuple[str, ...]:
        """What stands before and behind media with marks of this name; nothing without."""
        return tuple(self.tokens.get(f"{name}_{side}_token_id", "") for side in ("start", "end"))


def require_fit(processor: Processor, *, vocab_size: int, **expected: int | None) -> None:
    """Refuse a processor that was made for a model of other values than ``expected``; None: any."""
    ids, patches = processor.token_ids, processor.images
    found = {name: ids.get(name, getattr(patches, name, None)) for name in expected}
    wrong = [
        f"{name} is {found[name]} in the folder but {value} in the model"
        for name, value in expected.items()
        if found[name] != value and None not in (found[name], value)
    ]
    if processor.vocab_size > vocab_size:
        wrong.append(
            f"the tokenizer has {processor.vocab_size} ids but the model's vocab_size is"
            f" {vocab_size}"
        )
    if wrong:
        raise ValueError(
            f"{processor.folder} does not fit the model: {'; '.join(wrong)}. Name the folder that"
            " belongs to this model, or correct these values in the model's YAML."
        )


@dataclass(frozen=True)
class SpecialTexts:
    """A tokenizer's special tokens by how they are written, and their ids."""

    pattern: re.Pattern[str]
    ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, more: Sequence[str]) -> Self:
        """Those that the tokenizer calls special, and ``more``."""
        added = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        texts = added | set(tokenizer.all_special_tokens) | set(more)
        ids = set(tokenizer.convert_tokens_to_ids(sorted(texts))) - {tokenizer.unk_token_id, None}
        # The longest first: a regular expression takes the first that fits.
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        return cls(re.compile("|".join(map(re.escape, longest_first))), frozenset(ids))
