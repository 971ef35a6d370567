"""Features: what projectors hand to the decoder, and where they go.

Deepstack features are added behind the first decoder layers. They travel *with* the hidden states,
stacked in front of the sequence dimension: ``[(1 + k) * s, b, hidden]``, where k features are still
to be added and the first s rows are the hidden states themselves. Whatever carries hidden states
carries them too: the next layer, an activation checkpoint, the next pipeline stage or virtual
chunk. Their gradients come back the same way, so no schedule needs to know of them, but one that
takes layers apart (:mod:`loongplug.schedule`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_layer import TransformerLayer
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from loongplug.context.token_split import ContextShard
from loongplug.platform.devices import to_device

Places = Sequence[NDArray[np.int64]]  # as Unit.places, on the host


@dataclass(frozen=True)
class Features:
    """Features of one unit, token by token in the order of the text's tokens for them.

    They are of all the unit's tokens where the encoder has made them, and of those in a rank's
    part of the sequence where the decoder takes them.

    ``embeddings`` take the place of those tokens' embeddings, [tokens, hidden];
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
        """The features that :meth:`packed` was made of."""
        embeddings, *deepstack = payload.split(hidden, dim=1)
        return cls(embeddings=embeddings, deepstack=tuple(deepstack))


# Features of the step's microbatch of a number in this rank's part of the sequence: asked on the
# first stage, once per forward.
FeatureSource = Callable[[int], Features]


@dataclass(frozen=True, kw_only=True)
class TokenPlaces:
    """Places of the tokens of one encoder's media in a rank's part of the sequence.

    Sample by sample; all are [tokens in the part] int64 on the device: which of the unit's ``rows``
    of features they take, their ``sample``, their ``position`` within the part. ``count`` is of the
    whole sequence.
    """

    rows: Tensor
    sample: Tensor
    position: Tensor
    count: int


@dataclass(frozen=True, kw_only=True)
class PlacedFeatures:
    """An encoder's features of one unit, in a rank's part of the sequence, and their places."""

    features: Features
    places: TokenPlaces


def token_places(
    places: Places,
    *,
    held: ContextShard,
    device: torch.device,
    part: int = 0,
    parts: int = 1,
) -> TokenPlaces:
    """Tokens at ``places``, in the ``part``-th of so many ``parts`` of the ``held`` tokens.

    Positions count the tokens of that part. Made on the host, which knows them from the text and so
    never waits for the device.
    """
    size = held.tokens // parts
    positions = np.concatenate([np.zeros(0, dtype=np.int64), *places])
    samples = np.repeat(np.arange(len(places)), np.fromiter(map(len, places), dtype=np.int64))
    among = held.before(positions)
    rows = np.flatnonzero(held.holds(positions) & (among // size == part))
    found = np.stack([rows, samples[rows], among[rows] % size])  # [3, tokens in the part]
    row, sample, position = to_device(torch.from_numpy(found), device).unbind()
    return TokenPlaces(rows=row, sample=sample, position=position, count=len(positions))


def share_of(features: Features, *, places: TokenPlaces, group: ProcessGroup | None) -> Features:
    """The features of one rank's part of the sequence, of those that every rank has whole.

    Collective in the backward pass: the decoder's tensor parallel ``group``, whose ranks each get
    the gradient of all their parts. Without one, each rank's is that of its own part. ``places``
    are of the tokens in this rank's part.
    """
    _check_count(features.embeddings, tokens=places.count)
    payload = features.packed()
    if group is not None:
        payload = copy_to_tensor_model_parallel_region(payload, group=group)
    mine = payload.index_select(0, places.rows)
    return Features.unpacked(mine, hidden=features.embeddings.shape[1])


def place(target: Tensor, features: Tensor, *, places: TokenPlaces) -> Tensor:
    """``target`` [s, b, hidden] with ``features`` [tokens, hidden] at its places.

    Both are of this rank's part of the sequence.
    """
    _check_count(features, tokens=places.sample.shape[0])
    return target.index_put((places.position, places.sample), features.to(target.dtype))


def _check_count(features: Tensor, *, tokens: int) -> None:
    if features.shape[0] != tokens:
        raise ValueError(
            f"The text of this microbatch has {tokens} tokens for media, which give "
            f"{features.shape[0]} features: make the text with the same processor that reads the "
            "media."
        )


def stack_features(hidden_states: Tensor, features: list[Tensor]) -> Tensor:
    """Hidden states [s, b, h] and k features [s, b, h] as one [(1 + k) * s, b, h]."""
    return torch.cat([hidden_states, *features]) if features else hidden_states


def features_behind(*, layer: int, deepstack: int) -> int:
    """How many of ``deepstack`` features still travel into decoder layer ``layer`` (0-based)."""
    return max(0, deepstack - layer)


def take_features(stacked: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[(1 + count) * s, b, h] as hidden states [s, b, h] and the features [count * s, b, h]."""
    length = stacked.shape[0] // (1 + count)
    hidden_states, features = stacked.split([length, count * length])
    return hidden_states, features


def add_next_feature(hidden_states: Tensor, features: Tensor) -> Tensor:
    """[s, b, h] with the first of ``features`` [k * s, b, h] added and the rest stacked on it.

    Gives [k * s, b, h].
    """
    length = hidden_states.shape[0]
    own, rest = features.split([length, features.shape[0] - length])
    return torch.cat([hidden_states + own, rest])


class DeepstackTransformerLayer(TransformerLayer):
    """A decoder layer that adds its deepstack feature to its output and passes on the rest.

    The number of features is ``config.deepstack_features``; layer i (0-based, over the whole
    decoder) adds feature i.
    """

    @property
    def travelling(self) -> int:
        """How many features come with the hidden states."""
        return features_behind(
            layer=self.layer_number - 1, deepstack=self.config.deepstack_features
        )

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As TransformerLayer.forward, with ``hidden_states`` [(1 + k) * s, b, h]."""
        if self.travelling == 0:
            return super().forward(hidden_states, *args, **kwargs)
        hidden_states, features = take_features(hidden_states, self.travelling)
        hidden_states, context = super().forward(hidden_states, *args, **kwargs)
        return add_next_feature(hidden_states, features), context
