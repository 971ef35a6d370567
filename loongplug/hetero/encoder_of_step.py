"""This rank's encoder during one step, and what all ranks know of the step's units."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from loongplug.data.microbatch import Media, MediaInput, Microbatch, Unit
from loongplug.hetero.row_moves import ExchangeSpec, sequence_shards
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.encoder import EncoderInput, HandedOn
from loongplug.models.entries import Entry
from loongplug.models.multimodal import MultimodalModel
from loongplug.parallel.module_ddp import bucket_groups_of


class EncoderOfStep:
    """This rank's encoder during one step: units to payloads, gradients of payloads to its own."""

    def __init__(self, chunk: Any, model: MultimodalModel, *, entry: Entry, training: bool) -> None:
        """``chunk``: the rank's first, as Megatron wraps ``model``; it may have no encoder."""
        self._entry = entry
        self._chunk = chunk
        self._model = model
        self.trains = training and model.trains(entry)
        self.trains_before = False  # in a stage before this one

    def states(self, unit: Unit) -> int:
        """How many of them the encoder's layers have for a unit."""
        return sum(map(self._architecture.states, unit.grids))

    def payload(self, units: Sequence[Unit], *, states: Tensor | None = None) -> Tensor:
        """What this rank makes of units in one pass, or of no media, as it travels, [rows, width].

        ``states`` [rows, width] are what the stage before this one has handed on, in the place of
        media. Features of units stand one behind the other, as many as :meth:`tokens` of each.
        """
        with torch.set_grad_enabled(self.trains):
            given = self._given(units, states) if units else None
            return self._model.payload(self._entry, given)

    def tokens(self, unit: Unit) -> int:
        """How many features this rank makes of a unit."""
        grids = _media(unit).grids.tolist()
        return sum(self._architecture.tokens((time, high, wide)) for time, high, wide in grids)

    def _given(self, units: Sequence[Unit], states: Tensor | None) -> EncoderInput:
        if states is None:
            first, *others = (_media(each).taken() for each in units)
            return put_together([first, *others]) if others else first
        (unit,) = units
        grids = torch.tensor(unit.grids, dtype=torch.int64).reshape(-1, 3)
        states.requires_grad_(self.trains_before)
        return HandedOn.unpacked(states, grids=grids, hidden=self._architecture.hidden_size)

    @property
    def _architecture(self) -> EncoderArchitecture:
        encoder: Any = self._model.modules_of(self._entry)[self._entry.name]
        architecture: EncoderArchitecture = encoder.architecture
        return architecture

    def backward(self, payload: Tensor | GradientEdge, gradient: Tensor, *, more: bool) -> None:
        """Add to the encoder's gradients. With ``more`` to come they are not reduced yet."""
        with self._chunk.parts[self._entry.name].no_sync() if more else nullcontext():
            torch.autograd.backward(payload, gradient)

    def gather_weights(self) -> None:
        """Make weights whole, where the optimizer gathers in the forward. Collective: DP group."""
        part = self._chunk.parts[self._entry.name]
        if not part.ddp_config.overlap_param_gather:
            return
        groups = bucket_groups_of(part)
        for each in groups:
            if not each.param_gather_dispatched:
                each.start_param_sync()
        for each in groups:
            each.finish_param_sync(skip_next_bucket_dispatch=True)

    def reduce_gradients(self) -> None:
        """Start the reductions, unless who finalises gradients does. Collective: the DP group."""
        part = self._chunk.parts[self._entry.name]
        if part.ddp_config.overlap_grad_reduce:
            for each in bucket_groups_of(part):
                each.start_grad_sync(force_all_reduce=part.force_all_reduce)


def _media(unit: Unit) -> Media:
    assert unit.media is not None, "the unit was loaded somewhere else"
    return unit.media


def put_together(media: Sequence[MediaInput]) -> MediaInput:
    """Media of several units for one pass."""
    media = [each for each in media if len(each.grids)] or media[:1]  # of none, nothing is coded
    sizes, decoders = [len(each.loaded) for each in media], [each.decode for each in media]

    def decode(loaded: Tensor) -> Tensor:
        parts = zip(decoders, loaded.split(sizes), strict=True)
        return torch.cat([own(part) for own, part in parts])

    return MediaInput(
        loaded=torch.cat([each.loaded for each in media]),
        grids=torch.cat([each.grids for each in media]),
        decode=decode,
    )


def units_of(
    microbatches: Sequence[Microbatch], *, model: MultimodalModel, entry: Entry, taps: int
) -> ExchangeSpec:
    """What all who exchange these microbatches' units for an encoder know of them."""
    config: Any = model.config  # the decoder's
    units = [each.units[entry.name] for each in microbatches]
    shards = None
    if config.sequence_parallel or config.context_parallel_size > 1:
        tp = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shards = tuple(
            sequence_shards(unit.places, split=each.split, tp=tp)
            for unit, each in zip(units, microbatches, strict=True)
        )
    return ExchangeSpec(
        tokens=tuple(unit.tokens for unit in units),
        shares=tuple(unit.shares for unit in units),
        width=(1 + taps) * config.hidden_size,
        dtype=config.params_dtype,
        shards=shards,
        row_tokens=tuple(tuple(map(len, unit.places)) for unit in units),
    )
