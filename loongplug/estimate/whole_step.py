"""What a rank holds in a step whose passes depend on each other, piece by piece.

With the overlap a forward runs together with another microbatch's backward; tensors that leave the
device come back by the order of the passes. These cannot be traced one by one: a whole step of the
rank is run on tensors of the meta device.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel.combined_1f1b import combined_forward_backward_step
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from megatron.core.pipeline_parallel.utils import set_streams
from torch import Tensor

from loongplug.data.microbatch import VisionInput
from loongplug.estimate.away import Away
from loongplug.estimate.schedule import Piece
from loongplug.estimate.tape import Tape
from loongplug.estimate.trace import DECODER, ENCODER, PIXELS, Tracer, drop
from loongplug.models.decoder import TextDecoder
from loongplug.models.entries import Entry
from loongplug.models.features import VisionFeatures
from loongplug.models.layers.linear import DelayedGradient
from loongplug.models.layers.packed import pack_segments
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform import Platform
from loongplug.schedule.chunk_plan import plan_schedules
from loongplug.schedule.named_tensors import offload_layers
from loongplug.training.forward_step import LossReport, token_loss
from loongplug.training.provider import tensor_offload_of


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on the device behind a piece of work, and the most within it, of both together."""

    encoder: int = 0
    decoder: int = 0
    most: int = 0

    @property
    def total(self) -> int:
        """Behind it."""
        return self.encoder + self.decoder


@dataclass(frozen=True, kw_only=True)
class HeldStep:
    """A step's pieces in their order, and the most bytes that tensors have on the host."""

    pieces: tuple[Held, ...]
    host: int


class StepTracer(Tracer):
    """Traces whole steps of one rank, which has to be Megatron's current one."""

    def step(
        self,
        chunks: Sequence[MultimodalModel],
        order: Sequence[Piece],
        *,
        features_train: bool | None,
    ) -> HeldStep:
        """The pieces of ``order`` in turn; chunks are changed as the run changes them.

        ``features_train`` is None where the first chunk encodes within its forward; else its
        features come from a feature source.
        """
        for chunk in chunks:
            _drop_delayed(chunk)
            if chunk.pre_process and features_train is not None:
                chunk.feature_source = self._source(chunk, trains=features_train)
        with (
            self._tape(DECODER, *chunks) as tape,
            tape.resizes(),
            _encoder_apart(chunks[0], tape),
        ):
            away = Away(tape)
            offload = tensor_offload_of(self._args, platform=cast(Platform, away))
            if offload is not None:
                offload.expect(_backwards(order))
            for chunk in chunks:
                if offload is not None:
                    offload_layers(chunk, offload)
                if self._args.overlap_moe_expert_parallel_comm:
                    plan_schedules(chunk, offload=offload)
            stage = _Stage(tape, chunks, received=self._hidden, start=partial(self._start, tape))
            held = tuple(stage.step(order))
            return HeldStep(pieces=held, host=away.most)

    def _source(self, chunk: MultimodalModel, *, trains: bool) -> "_OneUnit":
        config = chunk.text_decoder.config
        shape = (self._share, config.feature_width)
        payload = torch.empty(shape, dtype=config.params_dtype, device="meta")
        return _OneUnit(payload, hidden=config.hidden_size, trains=trains)

    def _start(
        self, tape: Tape, chunk: MultimodalModel, *, plan: bool
    ) -> tuple[Any, Callable[[Tensor], LossReport]]:
        """A microbatch's output, or the plan of how to come to it, and its loss."""
        ids, positions, mask = self._text()
        segments = self._shapes.segments
        vision = None
        if chunk.pre_process and chunk.feature_source is None and chunk.encodes:
            with tape.region(PIXELS):
                vision = self._vision(self._pixels(chunk))
        output = (chunk.build_schedule_plan if plan else chunk)(
            ids,
            positions,
            vision=vision,
            number=0,
            labels=ids if chunk.post_process else None,
            loss_mask=mask,
            packed_seq_params=(
                None if segments is None else pack_segments(segments, device=ids.device)
            ),
        )
        return output, partial(token_loss, mask)


class _Stage:
    """One pipeline stage, with what its schedule keeps between the pieces."""

    def __init__(
        self,
        tape: Tape,
        chunks: Sequence[MultimodalModel],
        *,
        received: Callable[[TextDecoder], Tensor],
        start: Callable[..., tuple[Any, Any]],
    ) -> None:
        """``received`` makes what a decoder is sent by the stage before, ``start`` a forward."""
        self._tape = tape
        self._chunks = chunks
        self._received = received
        self._start = start
        # By chunk, in the order of its microbatches.
        self._inputs: defaultdict[int, list[Tensor | None]] = defaultdict(list)
        self._outputs: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._shapes: dict[int, torch.Size] = {}  # of a chunk's outputs
        self._gradient: Tensor | None = None  # came for the next backward
        self._output: Tensor | None = None  # sent last
        self._given: Tensor | None = None  # the gradient sent last

    def step(self, order: Sequence[Piece]) -> list[Held]:
        """Run the pieces; gives what each one held."""
        found = []
        self._come_for(order[0])
        for piece, behind in zip(order, [*order[1:], Piece()], strict=True):
            self._tape.restart()
            self._run(piece)
            self._come_for(behind)
            found.append(self._held())
        return found

    def _held(self) -> Held:
        live = self._tape.live
        return Held(
            encoder=live.get(ENCODER, 0) + live.get(PIXELS, 0),
            decoder=live.get(DECODER, 0),
            most=self._tape.most,
        )

    def _come_for(self, piece: Piece) -> None:
        """What other stages have sent for it."""
        if piece.forward is not None:
            decoder = self._chunks[piece.forward.chunk].text_decoder
            received = None if decoder.pre_process else self._received(decoder)
            self._inputs[piece.forward.chunk].append(received)
        if piece.backward is not None:
            chunk = self._chunks[piece.backward.chunk]
            if not chunk.post_process:
                self._gradient = torch.empty(
                    self._shapes[piece.backward.chunk],
                    dtype=chunk.text_decoder.config.params_dtype,
                    device="meta",
                )

    def _run(self, piece: Piece) -> None:
        """As Megatron's schedules do, with the calls around the pieces left out."""
        self._free_output()
        forward, backward = piece.forward, piece.backward
        goes = comes = received = None
        of_backward: tuple[Any, ...] = (None, None, None)  # input, output, gradient
        if forward is not None:
            goes, received = self._chunks[forward.chunk], self._inputs[forward.chunk][-1]
        if backward is not None:
            comes = self._chunks[backward.chunk]
            inputs, outputs = self._inputs[backward.chunk], self._outputs[backward.chunk]
            of_backward = inputs.pop(0), outputs.pop(0), self._gradient
            self._gradient = None
        together = self._chunks[0].config.overlap_moe_expert_parallel_comm
        output, given = (self._overlapped if together else self._alone)(
            goes, received, comes, of_backward
        )
        if backward is not None:
            self._given = given
        if forward is None or goes is None:
            return
        self._outputs[forward.chunk].append(output)
        self._shapes[forward.chunk] = output.shape
        self._output = None if goes.post_process else output
        if backward is None:  # sent at once
            self._free_output()

    def _overlapped(
        self,
        goes: MultimodalModel | None,
        received: Any,
        comes: MultimodalModel | None,
        of_backward: tuple[Any, ...],
    ) -> tuple[Any, Tensor | None]:
        """Gives the forward's output, which knows its plan, and the gradient of the input."""
        set_streams()
        output, _, given = combined_forward_backward_step(
            lambda _, model, return_schedule_plan: self._start(model, plan=True),
            None,
            goes,
            1,
            received,
            [],
            comes,
            *of_backward,
            self._chunks[0].config,
            f_model_chunk_id=None if goes is None else goes.vp_stage,
        )
        return output, given

    def _alone(
        self,
        goes: MultimodalModel | None,
        received: Any,
        comes: MultimodalModel | None,
        of_backward: tuple[Any, ...],
    ) -> tuple[Any, Tensor | None]:
        """As :meth:`_overlapped`, of one of the two."""
        if goes is not None:
            goes.set_input_tensor(received)
            output, loss = self._start(goes, plan=False)
            return (loss(output)[0] if goes.post_process else output), None
        entered, output, gradient = of_backward
        if not output.requires_grad:
            return None, None
        if gradient is None:
            output.backward()
        else:
            custom_backward(output, gradient)
        return None, None if entered is None else entered.grad

    def _free_output(self) -> None:
        """The next stage has it."""
        if self._output is not None:
            deallocate_output_tensor(
                self._output, self._chunks[0].config.deallocate_pipeline_outputs
            )
            self._output = None


class _OneUnit:
    """A feature source that gives the same features for every microbatch."""

    def __init__(self, payload: Tensor, *, hidden: int, trains: bool) -> None:
        self._hidden = hidden
        self._payload = payload.requires_grad_(trains)
        if trains:
            self._payload.register_post_accumulate_grad_hook(drop)

    def features(self, number: int) -> VisionFeatures:
        """Whichever ``number`` it is."""
        return VisionFeatures.unpacked(self._payload, hidden=self._hidden)


def _backwards(order: Sequence[Piece]) -> list[int]:
    """The backwards by the numbers of their forwards."""
    forwards = [piece.forward for piece in order if piece.forward is not None]
    return [forwards.index(piece.backward) for piece in order if piece.backward is not None]


def _drop_delayed(chunk: MultimodalModel) -> None:
    """Weights' gradients that come later go where the others go."""
    for module in chunk.modules():
        if isinstance(module, DelayedGradient):
            module.register_wgrad_accumulation_and_reduce_hooks(partial(drop, module.weight))


@contextmanager
def _encoder_apart(chunk: MultimodalModel, tape: Tape) -> Iterator[None]:
    """Inside, what the chunk's encoder makes is the encoder's."""
    encode = chunk.encode

    def apart(entry: Entry, vision: VisionInput | None) -> VisionFeatures:
        with tape.region(ENCODER):
            return encode(entry, vision)

    chunk.encode = apart  # type: ignore[method-assign]
    try:
        yield
    finally:
        del chunk.encode
