"""What one microbatch holds when it reaches the model."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loongplug.platform.transfers import to_device


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


@dataclass(frozen=True, kw_only=True)
class TextNeeds:
    """Which tensors of a microbatch's text a pipeline stage consumes; all take the positions."""

    input_ids: bool
    labels: bool
    loss_mask: bool

    @classmethod
    def of_stage(cls, *, first: bool, last: bool, balances: bool) -> "TextNeeds":
        """Ids where text is embedded, labels where the loss is.

        ``balances``: the stage has routers with a balancing loss, which ask what counts.
        """
        return cls(input_ids=first, labels=last, loss_mask=last or balances)

    @classmethod
    def any_of(cls, needs: Iterable["TextNeeds"]) -> "TextNeeds":
        """What at least one of them names."""
        needs = tuple(needs)
        return cls(
            input_ids=any(each.input_ids for each in needs),
            labels=any(each.labels for each in needs),
            loss_mask=any(each.loss_mask for each in needs),
        )


ALL_TEXT = TextNeeds(input_ids=True, labels=True, loss_mask=True)


@dataclass(frozen=True)
class Microbatch:
    """One microbatch in decoder layout: b samples padded on the right to s tokens, or one pack.

    What a stage has no use for is None there (see :class:`TextNeeds`).

    The labels are already shifted: ``labels[:, t]`` is the token that follows
    ``input_ids[:, t]``, and ``loss_mask[:, t]`` is 1 where that token counts.

    In a pack, b is 1 and the samples follow each other in the row, each attending to itself
    only; ``segments`` are then the tokens of each, on the host. Padding stands behind the last.
    """

    input_ids: Tensor | None  # [b, s] int64
    position_ids: Tensor  # [3, b, s] int64: time, height, width
    labels: Tensor | None  # [b, s] int64
    loss_mask: Tensor | None  # [b, s] float32
    tokens: int  # tokens before padding
    vision: VisionInput | None  # None on ranks that were told not to load images
    segments: tuple[int, ...] | None = None  # None: not packed, each row is one sample
    patches: int = 0  # of its images and videos, known also where they are not loaded
    # Of each row: where its visual tokens lie, ascending, known also where the ids are not needed.
    visual_places: tuple[NDArray[np.int64], ...] = ()
    number: int | None = None  # its place in the step, where somebody counts
    owner: int = 0  # which of the encoder's groups encodes its images and videos

    def __post_init__(self) -> None:
        if self.segments is not None:
            assert self.position_ids.shape[1] == 1, self.position_ids.shape
            assert sum(self.segments) == self.tokens, (self.segments, self.tokens)

    @property
    def capacity(self) -> int:
        """Tokens with padding."""
        return self.position_ids[0].numel()

    def to(self, device: torch.device) -> "Microbatch":
        """The same microbatch with its tensors on ``device`` (grids and places stay on the host).

        The host does not wait for the copies.
        """

        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else to_device(tensor, device)

        vision = self.vision
        if vision is not None:
            vision = VisionInput(pixels=to_device(vision.pixels, device), grid_thw=vision.grid_thw)
        return replace(
            self,
            input_ids=there(self.input_ids),
            position_ids=to_device(self.position_ids, device),
            labels=there(self.labels),
            loss_mask=there(self.loss_mask),
            vision=vision,
        )

    def only(self, needs: TextNeeds) -> "Microbatch":
        """The same without the text that ``needs`` does not name; what it names has to be here."""
        for name in ("input_ids", "labels", "loss_mask"):
            assert not getattr(needs, name) or getattr(self, name) is not None, name
        return replace(
            self,
            input_ids=self.input_ids if needs.input_ids else None,
            labels=self.labels if needs.labels else None,
            loss_mask=self.loss_mask if needs.loss_mask else None,
        )
