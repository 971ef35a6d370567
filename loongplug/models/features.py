"""Vision features: what the projector hands to the decoder, and where they go."""

from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VisionFeatures:
    """Features of one unit, token by token in the order of the text's visual tokens.

    They are of all the unit's tokens where the encoder has made them, and of those in a rank's
    part of the sequence where the decoder takes them.

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
        """Of the step's microbatch ``number``, those in this rank's part of the sequence.

        Asked on the first stage, once per forward.
        """
        ...


def share_of(features: VisionFeatures, *, mine: Tensor, group: ProcessGroup) -> VisionFeatures:
    """The features of one rank's part of the sequence, of those that every rank has whole.

    Collective in the backward pass: the decoder's tensor parallel ``group``, whose ranks each get
    the gradient of the whole.

    Args:
        mine: which of the unit's tokens lie in this rank's part, [tokens] bool.

    Raises:
        ValueError: when the text has more or fewer visual tokens than there are features.
    """
    _check_count(features.embeddings, visual_tokens=mine.shape[0])
    payload = copy_to_tensor_model_parallel_region(features.packed(), group=group)
    return VisionFeatures.unpacked(payload[mine], hidden=features.embeddings.shape[1])


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
    _check_count(features, visual_tokens=sample.shape[0])
    return target.index_put((position, sample), features.to(target.dtype))


def _check_count(features: Tensor, *, visual_tokens: int) -> None:
    if features.shape[0] != visual_tokens:
        raise ValueError(
            f"The text of this microbatch has {visual_tokens} visual tokens, its images give "
            f"{features.shape[0]} features. Each image needs exactly one visual token per merged "
            "patch: make the text with the same processor that makes the patches."
        )
