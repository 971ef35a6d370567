"""Vision features: what the projector hands to the decoder, and where they go."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class VisionFeatures:
    """The features of one unit, token by token in the order of the text's visual tokens.

    ``embeddings`` take the place of the visual tokens' embeddings, [tokens, hidden];
    ``deepstack[i]`` is added to the hidden states behind decoder layer i, [tokens, hidden].
    """

    embeddings: Tensor
    deepstack: tuple[Tensor, ...]

    def none_of_them(self) -> "VisionFeatures":
        """Zero tokens that still hang on the graph: every parameter gets a zero gradient."""
        return VisionFeatures(
            embeddings=self.embeddings[:0], deepstack=tuple(each[:0] for each in self.deepstack)
        )

    def packed(self) -> Tensor:
        """All of a token side by side, as it travels, [tokens, (1 + deepstack) * hidden]."""
        return torch.cat([self.embeddings, *self.deepstack], dim=1)

    @classmethod
    def unpacked(cls, payload: Tensor, *, hidden: int) -> "VisionFeatures":
        """What :meth:`packed` was made of."""
        embeddings, *deepstack = payload.split(hidden, dim=1)
        return cls(embeddings=embeddings, deepstack=tuple(deepstack))


class FeatureSource(Protocol):
    """Where a decoder gets its units' features from; it knows of no mode."""

    def features(self, number: int) -> VisionFeatures:
        """Of the step's microbatch ``number``. Asked on the first stage, once per forward."""
        ...


def visual_positions(input_ids: Tensor, token_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Sample and sequence index of every visual token, sample by sample, [tokens] int64 each."""
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for token_id in token_ids:
        mask |= input_ids == token_id
    sample, position = mask.nonzero(as_tuple=True)
    return sample, position


def place(target: Tensor, features: Tensor, *, sample: Tensor, position: Tensor) -> Tensor:
    """``target`` [s, b, hidden] with ``features`` [tokens, hidden] at the visual positions.

    Raises:
        ValueError: when the text has more or fewer visual tokens than there are features.
    """
    if features.shape[0] != sample.shape[0]:
        raise ValueError(
            f"The text of this microbatch has {sample.shape[0]} visual tokens, its images give "
            f"{features.shape[0]} features. Each image needs exactly one visual token per merged "
            "patch: make the text with the same processor that makes the patches."
        )
    return target.index_put((position, sample), features.to(target.dtype))
