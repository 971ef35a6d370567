"""What microbatches leave behind in a rank's chunks, and what they take while they are at work.

The model's own forward and backward run on tensors of the meta device, so that freezing,
recompute, adapters, sequence parallelism and deepstack streams are those of the run.
"""

import weakref
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from loongplug.data.microbatch import MediaInput, Unit
from loongplug.estimate.stage import Held, TracedStage, region_of
from loongplug.estimate.stand_ins import (
    answers,
    devices_and_buffers,
    spread_places,
    spread_tokens_evenly,
)
from loongplug.estimate.tape import DECODER, ENCODER, FlashAttention, Tape
from loongplug.hetero.pass_order import Turn
from loongplug.models.encoder_stages import EncoderInput, HandedOn
from loongplug.models.entries import Entry
from loongplug.models.features import Features
from loongplug.models.layers.linear import DelayedGradient
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform import Platform
from loongplug.schedule.chunk_plan import plan_schedules
from loongplug.schedule.named_tensors import offload_layers
from loongplug.training.apart import decoder_layout_of
from loongplug.training.provider import tensor_offload_of

_SHARED = "shared buffers"  # one set for all layers and microbatches


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Bytes of a unit in an encoder.

    ``kept`` stays between its forward and its backward; ``forward`` is the most that its forward
    holds at one time, ``backward`` the most that its backward holds besides what stayed. None of
    these has its input, media or what the stage before has made; ``keeps_input``: it stays, too.
    """

    kept: int = 0
    forward: int = 0
    backward: int = 0
    keeps_input: bool = False


@dataclass(frozen=True, kw_only=True)
class StageBefore:
    """An encoder's stage, as the next one sees it.

    A state that it hands on has so many numbers, its ``width``, and a gradient where it ``trains``
    or one before it does.
    """

    width: int
    trains: bool


class Tracer:
    """Traces the chunks of one rank, which has to be Megatron's current one.

    All microbatches have units like those of ``like``, with media for each encoder, and
    ``segments`` where they are packs. ``features_train`` has the encoders whose features come from
    a feature source; the first chunk encodes the units of others within its forward.
    """

    def __init__(
        self,
        args: Namespace,
        model: Any,
        like: Mapping[str, Unit],
        *,
        segments: tuple[int, ...] | None = None,
        features_train: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        self._args = args
        self._model = model
        self._segments = segments
        self._features_train = features_train
        # Parts of the sequence, over which tokens of media are spread evenly.
        self._parts = decoder_layout_of(args).sequence_shards(
            sequence_parallel=args.sequence_parallel
        )
        self._units = {
            name: Unit(
                grids=unit.grids,
                places=(np.arange(unit.tokens),),
                media=MediaInput(  # grids in the host's memory, which no tape looks at
                    rows=torch.empty(unit.rows, model.encoder(name).row_values, device="meta"),
                    grids=torch.tensor(unit.grids),
                ),
            )
            for name, unit in like.items()
        }

    def encoder(
        self, chunk: MultimodalModel, entry: Entry, *, before: StageBefore | None = None
    ) -> UnitBytes:
        """A unit through an encoder's stage, to its payload (which is not counted).

        ``before`` is the stage before this one, None for the first.
        """
        given = self._given(entry, before, dtype=chunk.config.params_dtype)
        taken = given.states if isinstance(given, HandedOn) else given.rows
        input_ = weakref.ref(taken.untyped_storage())
        del taken
        with self._tape(ENCODER, chunk) as tape:
            payload = chunk.payload(entry, given)
            del given
            forward = tape.most
            kept = tape.live[ENCODER] - payload.nbytes
            if not payload.requires_grad:
                return UnitBytes(forward=forward)
            keeps_input = input_() is not None
            tape.restart()
            payload.backward(torch.empty_like(payload))
            backward = max(0, tape.most - kept)
            return UnitBytes(kept=kept, forward=forward, backward=backward, keeps_input=keeps_input)

    def _given(
        self, entry: Entry, before: StageBefore | None, *, dtype: torch.dtype
    ) -> EncoderInput:
        """The unit as a stage is given it."""
        unit, architecture = self._units[entry.name], self._model.encoder(entry.name)
        assert unit.media is not None
        if before is None:
            # Nothing else holds them.
            return MediaInput(rows=torch.empty_like(unit.media.rows), grids=unit.media.grids)
        count = sum(map(architecture.states, unit.grids))
        payload = torch.empty(count, before.width, dtype=dtype, device="meta")
        return HandedOn.unpacked(
            payload.requires_grad_(before.trains),
            grids=unit.media.grids,
            hidden=architecture.hidden_size,
        )

    def alone(self, chunk: MultimodalModel) -> tuple[Held, Held]:
        """A forward and a backward of one chunk that have nothing to do with others."""
        with self._stage(chunk) as stage:
            return stage.alone()

    def step(
        self, chunks: Sequence[MultimodalModel], order: Sequence[Turn]
    ) -> tuple[list[Held], int]:
        """The turns of ``order`` in turn, and the most bytes that tensors have on the host.

        For passes that depend on each other: with the overlap a forward runs together with another
        microbatch's backward; tensors that leave the device come back by the order of the passes.
        Chunks are changed as the run changes them.
        """
        with self._stage(*chunks) as stage:
            offload = tensor_offload_of(self._args, platform=cast(Platform, stage.platform))
            if offload is not None:
                offload.expect(_backwards(order))
            for chunk in chunks:
                _drop_delayed(chunk)
                if offload is not None:
                    offload_layers(chunk, offload)
                if self._args.overlap_moe_expert_parallel_comm:
                    plan_schedules(chunk, offload=offload)
            return stage.step(order), stage.platform.most

    @contextmanager
    def _tape(self, region: str, *chunks: MultimodalModel) -> Iterator[Tape]:
        """A tape under which gradients go where the run's go: away, into buffers that are there."""
        tape = Tape(
            region=region,
            answers=answers(
                experts_per_token=self._args.moe_router_topk,
                experts=self._args.num_experts or 1,
            ),
        )
        with ExitStack() as entered:
            for chunk in chunks:
                spread_tokens_evenly(chunk)
                for each in chunk.parameters():
                    if each.requires_grad:
                        hook = each.register_post_accumulate_grad_hook(_drop)
                        entered.callback(hook.remove)
            entered.enter_context(FlashAttention())
            entered.enter_context(devices_and_buffers(tape, region=_SHARED))
            entered.enter_context(tape.resizes())
            yield entered.enter_context(tape)

    @contextmanager
    def _stage(self, *chunks: MultimodalModel) -> Iterator[TracedStage]:
        """The chunks under a tape, which has what encoders make apart from the decoder's."""
        first = chunks[0]
        for chunk in chunks:
            spread_places(chunk.text_decoder, parts=self._parts)
        if first.pre_process:
            first.feature_sources = {
                name: self._source(first, name, trains=trains)
                for name, trains in self._features_train.items()
            }
        encode = first.encode

        def apart(entry: Entry, media: MediaInput) -> Features:
            with tape.region(region_of(entry.name)):
                return encode(entry, MediaInput(rows=media.rows.clone(), grids=media.grids))

        first.encode = apart  # type: ignore[method-assign, assignment]
        try:
            with self._tape(DECODER, *chunks) as tape:
                yield TracedStage(
                    tape, chunks, self._args, units=self._units, segments=self._segments
                )
        finally:
            del first.encode

    def _source(self, chunk: MultimodalModel, encoder: str, *, trains: bool) -> Any:
        """A feature source that gives the same features for every microbatch."""
        config = chunk.text_decoder.config
        width = (1 + len(self._model.encoder(encoder).taps())) * config.hidden_size
        shape = (-(-self._units[encoder].tokens // self._parts), width)
        payload = torch.empty(shape, dtype=config.params_dtype, device="meta")
        if trains:
            payload.requires_grad_().register_post_accumulate_grad_hook(_drop)
        return SimpleNamespace(
            features=lambda number: Features.unpacked(payload, hidden=config.hidden_size)
        )


def _backwards(order: Sequence[Turn]) -> list[int]:
    """The backwards by the numbers of their forwards."""
    forwards = [turn.forward for turn in order if turn.forward is not None]
    return [forwards.index(turn.backward) for turn in order if turn.backward is not None]


def _drop_delayed(chunk: MultimodalModel) -> None:
    """Weights' gradients that come later go where the others go."""
    for module in chunk.modules():
        if isinstance(module, DelayedGradient):
            module.register_wgrad_accumulation_and_reduce_hooks(partial(_drop, module.weight))


def _drop(tensor: Tensor) -> None:
    """Let go of a gradient: in a run it is added to a buffer that is there."""
    tensor.grad = None
