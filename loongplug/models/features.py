"""Vision features: what the projector hands to the decoder, and where they go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from loongplug.platform.transfers import to_device

VisualPlaces = Sequence[NDArray[np.int64]]  # as Microbatch.visual_places, on the host


@dataclass(frozen=True)
class Features:
    """Features of one unit, token by token in the order of the text's visual tokens.

    They are of all the unit's tokens where the encoder has made them, and of those in a rank's
    part of the sequence where the decoder takes them.

    ``embeddings`` take the place of the visual tokens' embeddings, [tokens, hidden];
    ``deepstack[i]`` is added to the hidden states behind decoder layer i, [tokens, hidden].
    """

    embeddings: Tensor
    deepstack: tuple[Tensor, ...]

    def empty(self) -> "Features":
        """Zero tokens that still hang on the graph: every parameter gets a zero gradient."""
        return Features(
            embeddings=self.embeddings[:0], deepstack=tuple(each[:0] for each in self.deepstack)
        )

    def packed(self) -> Tensor:
        """All of a token side by side, as it travels, [tokens, (1 + deepstack) * hidden]."""
        return torch.cat([self.embeddings, *self.deepstack], dim=1)

    @classmethod
    def unpacked(cls, payload: Tensor, *, hidden: int) -> "Features":
        """What :meth:`packed` was made of."""
        embeddings, *deepstack = payload.split(hidden, dim=1)
        return cls(embeddings=embeddings, deepstack=tuple(deepstack))


class FeatureSource(Protocol):
    """Where a decoder gets its units' features from; it knows of no mode."""

    def features(self, number: int) -> Features:
        """Of the step's microbatch ``number``, those in this rank's part of the sequence.

        Asked on the first stage, once per forward.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class VisualTokens:
    """Where the visual tokens in a rank's part of the sequence lie, sample by sample.

    All are [tokens in the part] int64 on the device: which of the unit's ``rows`` of features they
    take, their ``sample``, their ``position`` within the part. ``count`` is of the whole sequence.
    """

    rows: Tensor
    sample: Tensor
    position: Tensor
    count: int


def visual_tokens(
    places: VisualPlaces,
    *,
    length: int,
    device: torch.device,
    part: int = 0,
    parts: int = 1,
) -> VisualTokens:
    """Those at ``places``, in the ``part``-th of so many ``parts`` of a sequence of ``length``.

    Made on the host, which knows them from the text and so never waits for the device.
    """
    size = length // parts
    positions = np.concatenate([np.zeros(0, dtype=np.int64), *places])
    samples = np.repeat(np.arange(len(places)), np.fromiter(map(len, places), dtype=np.int64))
    rows = np.flatnonzero(positions // size == part)
    found = np.stack([rows, samples[rows], positions[rows] % size])  # [3, tokens in the part]
    row, sample, position = to_device(torch.from_numpy(found), device).unbind()
    return VisualTokens(rows=row, sample=sample, position=position, count=len(positions))


def share_of(features: Features, *, visual: VisualTokens, group: ProcessGroup) -> Features:
    """The features of one rank's part of the sequence, of those that every rank has whole.

    Collective in the backward pass: the decoder's tensor parallel ``group``, whose ranks each get
    the gradient of the whole.

    Args:
        visual: the visual tokens in this rank's part.

    Raises:
        ValueError: when the text has more or fewer visual tokens than there are features.
    """
    _check_count(features.embeddings, visual_tokens=visual.count)
    payload = copy_to_tensor_model_parallel_region(features.packed(), group=group)
    mine = payload.index_select(0, visual.rows)
    return Features.unpacked(mine, hidden=features.embeddings.shape[1])


def place(target: Tensor, features: Tensor, *, visual: VisualTokens) -> Tensor:
    """``target`` [s, b, hidden] with ``features`` [tokens, hidden] at the visual positions.

    Both are of this rank's part of the sequence.

    Raises:
        ValueError: when the text has more or fewer visual tokens than there are features.
    """
    _check_count(features, visual_tokens=visual.sample.shape[0])
    return target.index_put((visual.position, visual.sample), features.to(target.dtype))


def _check_count(features: Tensor, *, visual_tokens: int) -> None:
    if features.shape[0] != visual_tokens:
        raise ValueError(
            f"The text of this microbatch has {visual_tokens} visual tokens, its images give "
            f"{features.shape[0]} features. Each image needs exactly one visual token per merged "
            "patch: make the text with the same processor that makes the patches."
        )
