"""This rank's encoder during one step, and what all ranks know of the step's units."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from loongplug.data.microbatch import Microbatch, Unit
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.routes import sequence_shards
from loongplug.models.entries import Entry
from loongplug.models.multimodal import MultimodalModel


class EncoderOfStep:
    """This rank's encoder during one step: units to payloads, gradients of payloads to its own."""

    def __init__(self, chunk: Any, model: MultimodalModel, *, entry: Entry, training: bool) -> None:
        """``chunk``: the rank's first, as Megatron wraps ``model``; it may have no encoder."""
        self._entry = entry
        self._chunk = chunk
        self._model = model
        self.trains = training and model.trains(entry)

    def payload(self, unit: Unit | None) -> Tensor:
        """A unit's features as they travel, [tokens, width]; None stands for no media at all."""
        media = None if unit is None else unit.media
        assert unit is None or media is not None, "the unit was loaded somewhere else"
        with torch.set_grad_enabled(self.trains):
            return self._model.encode(self._entry, media).packed()

    def backward(self, payload: Tensor | GradientEdge, gradient: Tensor, *, more: bool) -> None:
        """Add to the encoder's gradients. With ``more`` to come they are not reduced yet."""
        with self._chunk.parts[self._entry.name].no_sync() if more else nullcontext():
            torch.autograd.backward(payload, gradient)


def units_of(
    microbatches: Sequence[Microbatch],
    *,
    model: MultimodalModel,
    entry: Entry,
    taps: int,
) -> ExchangeSpec:
    """What all who exchange these microbatches' units for an encoder know of them."""
    config: Any = model.config  # the decoder's
    units = [each.units[entry.name] for each in microbatches]
    shards = None
    if config.sequence_parallel:
        tp = config.tensor_model_parallel_size
        shards = tuple(
            sequence_shards(unit.places, length=each.position_ids.shape[-1], parts=tp)
            for unit, each in zip(units, microbatches, strict=True)
        )
    return ExchangeSpec(
        tokens=tuple(unit.tokens for unit in units),
        encoder_replicas=tuple(unit.encoder_replica for unit in units),
        width=(1 + taps) * config.hidden_size,
        dtype=config.params_dtype,
        shards=shards,
        row_tokens=tuple(tuple(map(len, unit.places)) for unit in units),
    )
