"""One pipeline stage at work on tensors without memory, turn by turn, as Megatron's schedules do.

Layers are those without TransformerEngine, attention keeps what flash kernels keep.
"""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.combined_1f1b import combined_forward_backward_step
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from megatron.core.pipeline_parallel.utils import set_streams
from torch import Tensor

from loongplug.data.microbatch import Unit
from loongplug.estimate.tape import DECODER, ENCODER, Tape
from loongplug.hetero.pass_order import Turn
from loongplug.models.deepstack import features_behind
from loongplug.models.layers.context.row import context_row
from loongplug.models.layers.packed import PackedSegments, pack_segments
from loongplug.models.multimodal import MultimodalModel
from loongplug.training.decoder_data import row_parts
from loongplug.training.forward_step import LossReport, token_loss

_META = torch.device("meta")
_Backward = tuple[Any, Any, Any]  # a chunk's input, its output and the gradient of that


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on the device behind a turn of work, and the most within it, of all together.

    ``encoders`` are those that encode within the chunk's forward, by name.
    """

    encoders: Mapping[str, int] = field(default_factory=dict)
    decoder: int = 0
    most: int = 0

    @property
    def total(self) -> int:
        """Behind it."""
        return sum(self.encoders.values()) + self.decoder


class TracedStage:
    """Its chunks, with what its schedule keeps between the turns.

    All microbatches have these ``units`` by encoder, and ``segments`` where they are packs.
    """

    def __init__(
        self,
        tape: Tape,
        chunks: Sequence[MultimodalModel],
        args: Namespace,
        *,
        units: Mapping[str, Unit],
        segments: tuple[int, ...] | None,
    ) -> None:
        self._tape = tape
        self._chunks = chunks
        self._args = args
        self._segments = segments
        self._units = units
        # By chunk, in the order of its microbatches.
        self._inputs: defaultdict[int, list[Tensor | None]] = defaultdict(list)
        self._outputs: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._gradient: Tensor | None = None  # came for the next backward
        self._output: Tensor | None = None  # sent last
        self._given: Tensor | None = None  # the gradient sent last

    def step(self, order: Sequence[Turn]) -> list[Held]:
        """Do the turns; gives what each one held."""
        found = []
        self._come_for(order[0])
        for turn, behind in zip(order, [*order[1:], Turn()], strict=True):
            self._tape.restart()
            self._run(turn)
            self._come_for(behind)
            live = self._tape.live
            found.append(
                Held(
                    encoders={name: live.get(region_of(name), 0) for name in self._units},
                    decoder=live.get(DECODER, 0),
                    most=self._tape.most,
                )
            )
        return found

    def _come_for(self, turn: Turn) -> None:
        """What other stages have sent for it."""
        if turn.forward is not None:
            chunk = self._chunks[turn.forward.chunk]
            self._inputs[turn.forward.chunk].append(received(chunk, self._args))
        if turn.backward is not None:
            self._gradient = sent(self._chunks[turn.backward.chunk], self._args)

    def _run(self, turn: Turn) -> None:
        """As Megatron's schedules do, with the calls around the turns left out."""
        self._free_output()
        forward, backward = turn.forward, turn.backward
        goes = comes = entering = None
        of_backward: _Backward = (None, None, None)
        if forward is not None:
            goes, entering = self._chunks[forward.chunk], self._inputs[forward.chunk][-1]
        if backward is not None:
            comes = self._chunks[backward.chunk]
            inputs, outputs = self._inputs[backward.chunk], self._outputs[backward.chunk]
            of_backward = inputs.pop(0), outputs.pop(0), self._gradient
            self._gradient = None
        together = self._chunks[0].config.overlap_moe_expert_parallel_comm
        output, given = (self._overlapped if together else self._alone)(
            goes, entering, comes, of_backward
        )
        if backward is not None:
            self._given = given
        if forward is None or goes is None:
            return
        self._outputs[forward.chunk].append(output)
        self._output = None if goes.post_process else output
        if backward is None:  # sent at once
            self._free_output()

    def _overlapped(
        self,
        goes: MultimodalModel | None,
        entering: Any,
        comes: MultimodalModel | None,
        of_backward: _Backward,
    ) -> tuple[Any, Tensor | None]:
        """Gives the forward's output, which knows its plan, and the gradient of the input."""
        set_streams()
        output, _, given = combined_forward_backward_step(
            lambda _, model, return_schedule_plan: self._start(model, planned=True),
            None,
            goes,
            1,
            entering,
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
        entering: Any,
        comes: MultimodalModel | None,
        of_backward: _Backward,
    ) -> tuple[Any, Tensor | None]:
        """As :meth:`_overlapped`, of one of the two."""
        if goes is not None:
            goes.set_input_tensor(entering)
            output, loss = self._start(goes)
            return (loss(output)[0] if goes.post_process else output), None
        entered, output, gradient = of_backward
        if not output.requires_grad:
            return None, None
        if gradient is None:
            output.backward()
        else:
            custom_backward(output, gradient)
        return None, None if entered is None else entered.grad

    def _start(
        self, chunk: MultimodalModel, *, planned: bool = False
    ) -> tuple[Any, Callable[[Tensor], LossReport]]:
        """A microbatch's output, or the plan of how to come to it, and its loss."""
        shape = (self._args.micro_batch_size, held_tokens(self._args))
        ids = torch.empty(shape, dtype=torch.int64, device=_META)
        mask = ids.float()
        output = (chunk.build_schedule_plan if planned else chunk)(
            ids,
            torch.empty((3, *shape), dtype=torch.int64, device=_META),
            units=self._units,
            number=0,
            labels=ids if chunk.post_process else None,
            loss_mask=mask,
            packed_seq_params=self._packed(),
        )
        return output, partial(token_loss, mask)

    def _packed(self) -> PackedSegments | None:
        """A pack's segments, or those of a row of which this rank holds a part."""
        length, segments = self._args.seq_length, self._segments
        parts = row_parts(self._args)
        if parts is None:
            return None if segments is None else pack_segments(segments, device=_META)
        own = parts.of(length, segments=segments)
        row = context_row(own.split, segments or (length,), rank=own.rank, device=_META)
        return PackedSegments(qkv_format="sbhd" if segments is None else "thd", context=row)

    def _free_output(self) -> None:
        """The next stage has it."""
        if self._output is not None:
            deallocate_output_tensor(
                self._output, self._chunks[0].config.deallocate_pipeline_outputs
            )
            self._output = None


def held_tokens(args: Namespace) -> int:
    """Of a row, by a rank."""
    held: int = args.seq_length // args.context_parallel_size
    return held


def region_of(encoder: str) -> str:
    """Where a tape counts what an encoder makes, and the rows that it is given."""
    return f"{ENCODER} of {encoder}"


def buffers(chunks: Sequence[MultimodalModel], args: Namespace) -> int:
    """Bytes that Megatron's schedules hold between stages besides what a pass takes and leaves.

    1F1B: the gradient that was sent last. Interleaved, with several chunks: what has come for the
    next forward and the next backward, and what was sent by the last ones.
    """
    moved = [
        [0 if each is None else each.nbytes for each in (received(chunk, args), sent(chunk, args))]
        for chunk in chunks
    ]
    return moved[0][0] if len(moved) == 1 else 2 * max(map(sum, moved))


def received(chunk: MultimodalModel, args: Namespace) -> Tensor | None:
    """What the chunk is sent by the stage before."""
    if chunk.pre_process:
        return None
    first = chunk.text_decoder.decoder.layers[0].layer_number
    return _hidden(chunk, args, layers=first - 1).requires_grad_()


def sent(chunk: MultimodalModel, args: Namespace) -> Tensor | None:
    """What the chunk sends to the stage behind, or a gradient of it."""
    if chunk.post_process:
        return None
    return _hidden(chunk, args, layers=chunk.text_decoder.decoder.layers[-1].layer_number)


def _hidden(chunk: MultimodalModel, args: Namespace, *, layers: int) -> Tensor:
    """Hidden states behind so many of all layers, with the deepstack streams that are left."""
    config = chunk.text_decoder.config
    streams = 1 + features_behind(layer=layers, deepstack=config.deepstack_features)
    length = held_tokens(args)
    if config.sequence_parallel:
        length //= config.tensor_model_parallel_size
    shape = (streams * length, args.micro_batch_size, config.hidden_size)
    return torch.empty(shape, dtype=config.params_dtype, device=_META)
