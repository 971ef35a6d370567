"""Deepstack: vision features that are added behind the first decoder layers.

The features travel *with* the hidden states, stacked in front of the sequence dimension:
``[(1 + k) * s, b, hidden]``, where k features are still to be added and the first s rows are the
hidden states themselves. Whatever carries hidden states carries them too: the next layer, an
activation checkpoint, the next pipeline stage or virtual chunk. Their gradients come back the
same way, so no schedule needs to know of them, but one that takes layers apart
(:mod:`loongplug.schedule`).
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


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
