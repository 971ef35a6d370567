"""What one microbatch holds when it reaches the model."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class VisionInput:
    """A microbatch's images and videos (a *unit*), in the order their tokens appear in the text.

    ``pixels`` are the processors' patches, [patches, channels * temporal * patch * patch]
    float32; ``grid_thw`` are the patch grids, [images and videos, 3] int64 on the host (time,
    height, width in patches); an image's time is 1. A microbatch without either has zero rows
    in both: it takes part in everything as a zero-length unit.
    """

    pixels: Tensor
    grid_thw: Tensor

    def __post_init__(self) -> None:
        expected = int(self.grid_thw.prod(dim=-1).sum())
        assert self.pixels.shape[0] == expected, (self.pixels.shape, self.grid_thw.tolist())


@dataclass(frozen=True)
class Microbatch:
    """One microbatch in decoder layout: b samples padded on the right to s tokens, or one pack.

    The labels are already shifted: ``labels[:, t]`` is the token that follows
    ``input_ids[:, t]``, and ``loss_mask[:, t]`` is 1 where that token counts.

    In a pack, b is 1 and the samples follow each other in the row, each attending to itself
    only; ``segments`` are then the tokens of each, on the host. Padding stands behind the last.
    """

    input_ids: Tensor  # [b, s] int64
    position_ids: Tensor  # [3, b, s] int64: time, height, width
    labels: Tensor  # [b, s] int64
    loss_mask: Tensor  # [b, s] float32
    tokens: int  # tokens before padding
    vision: VisionInput | None  # None on ranks that were told not to load images
    segments: tuple[int, ...] | None = None  # None: not packed, each row is one sample

    def __post_init__(self) -> None:
        if self.segments is not None:
            assert len(self.input_ids) == 1, self.input_ids.shape
            assert sum(self.segments) == self.tokens, (self.segments, self.tokens)

    @property
    def capacity(self) -> int:
        """Tokens with padding."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> "Microbatch":
        """The same microbatch with its tensors on ``device`` (grids stay on the host)."""
        vision = self.vision
        if vision is not None:
            vision = VisionInput(
                pixels=vision.pixels.to(device, non_blocking=True), grid_thw=vision.grid_thw
            )
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            vision=vision,
        )

    def pin_memory(self) -> "Microbatch":
        """The same with the text part in page-locked memory."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            labels=self.labels.pin_memory(),
            loss_mask=self.loss_mask.pin_memory(),
        )
