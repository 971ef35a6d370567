"""One pipeline stage at work on tensors without memory, in Megatron's own schedules.

Layers are those without TransformerEngine, attention keeps what flash kernels keep.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import combined_1f1b, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from loongplug.data.microbatch import Microbatch, Unit
from loongplug.estimate.stand_ins import Away
from loongplug.estimate.tape import DECODER, ENCODER, Tape
from loongplug.hetero.pass_order import Turn
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform import Platform
from loongplug.training.decoder_data import row_parts
from loongplug.training.forward_step import ForwardStep

_META = torch.device("meta")


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
    """Its chunks, and what the ``tape`` sees around each turn of their work.

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
        self.platform = Away(tape)
        self._forward_step = ForwardStep(cast(Platform, self.platform))

    def alone(self) -> tuple[Held, Held]:
        """A forward and a backward of the only chunk, and of one microbatch."""
        (chunk,) = self._chunks
        entering = received(chunk, self._args)
        self._tape.restart()
        output, _ = schedules.forward_step(
            self._forward_step,
            self._microbatches(chunk),
            chunk,
            1,
            entering,
            [],
            chunk.config,
            cp_group_size=parallel_state.get_context_parallel_world_size(),
            vp_stage=chunk.vp_stage,
            is_last_stage=chunk.post_process,
        )
        if not chunk.post_process:
            schedules.deallocate_output_tensor(output, chunk.config.deallocate_pipeline_outputs)
        forward = self._held()
        gradient = sent(chunk, self._args)
        self._tape.restart()
        schedules.backward_step(entering, output, gradient, chunk.config)
        return forward, self._held()

    def step(self, order: Sequence[Turn]) -> list[Held]:
        """A step of which these are the turns; gives what each one held."""
        found: list[Held] = []  # before each turn, and in the end

        def noted(work: Callable[..., Any]) -> Callable[..., Any]:
            def turn(*args: Any, **kwargs: Any) -> Any:
                found.append(self._held())
                self._tape.restart()
                return work(*args, **kwargs)

            return turn

        model, combined = [*self._chunks], combined_1f1b.combined_forward_backward_step
        with (
            patch.object(P2PCommunicator, "_communicate", self._messages(order)),
            patch.object(schedules, "forward_step", noted(schedules.forward_step)),
            patch.object(schedules, "backward_step", noted(schedules.backward_step)),
            patch.object(combined_1f1b, combined.__name__, noted(combined)),
        ):
            schedules.get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=[self._microbatches(chunk) for chunk in model],
                model=model,
                num_microbatches=sum(turn.forward is not None for turn in order) // len(model),
                seq_length=self._args.seq_length,
                micro_batch_size=self._args.micro_batch_size,
            )
        found.append(self._held())
        assert len(found) == len(order) + 1, "the schedule has other turns"
        return found[1:]

    def _messages(self, order: Sequence[Turn]) -> Callable[..., Any]:
        """In the place of Megatron's: other stages send at once, and what is sent is theirs."""
        chunks, args = self._chunks, self._args
        forwards = (chunks[turn.forward.chunk] for turn in order if turn.forward is not None)
        backwards = (chunks[turn.backward.chunk] for turn in order if turn.backward is not None)
        outputs = (received(chunk, args) for chunk in forwards if not chunk.pre_process)
        gradients = (sent(chunk, args) for chunk in backwards if not chunk.post_process)

        def communicate(_: Any, *, recv_prev: bool, recv_next: bool, **others: Any) -> Any:
            moves = {
                "send_next": others["tensor_send_next"] is not None,
                "send_prev": others["tensor_send_prev"] is not None,
                "recv_prev": recv_prev,
                "recv_next": recv_next,
            }
            done = SimpleNamespace(wait=lambda: None)
            return (
                next(outputs) if recv_prev else None,
                next(gradients) if recv_next else None,
                {name: done for name, moved in moves.items() if moved},
            )

        return communicate

    def _held(self) -> Held:
        live = self._tape.live
        return Held(
            encoders={name: live.get(region_of(name), 0) for name in self._units},
            decoder=live.get(DECODER, 0),
            most=self._tape.most,
        )

    def _microbatches(self, chunk: MultimodalModel) -> Iterator[Microbatch]:
        """As many as are asked for; nothing else holds one."""
        return iter(partial(self._microbatch, chunk), None)

    def _microbatch(self, chunk: MultimodalModel) -> Microbatch:
        args, segments, parts = self._args, self._segments, row_parts(self._args)
        shape = (args.micro_batch_size, held_tokens(args))
        ids = torch.empty(shape, dtype=torch.int64, device=_META)
        return Microbatch(
            input_ids=ids,
            position_ids=torch.empty((3, *shape), dtype=torch.int64, device=_META),
            labels=ids if chunk.post_process else None,
            loss_mask=ids.float(),
            tokens=args.seq_length * args.micro_batch_size if segments is None else sum(segments),
            units=self._units,
            segments=segments,
            own=None if parts is None else parts.of(args.seq_length, segments=segments),
        )


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
    return None if chunk.pre_process else _hidden(chunk, args, behind=False).requires_grad_()


def sent(chunk: MultimodalModel, args: Namespace) -> Tensor | None:
    """What the chunk sends to the stage behind, or a gradient of it."""
    return None if chunk.post_process else _hidden(chunk, args, behind=True)


def _hidden(chunk: MultimodalModel, args: Namespace, *, behind: bool) -> Tensor:
    """Hidden states before or ``behind`` its layers, with the deepstack streams that are left."""
    config = chunk.text_decoder.config
    length = held_tokens(args)
    if config.sequence_parallel:
        length //= config.tensor_model_parallel_size
    rows = (1 + chunk.text_decoder.travelling(behind=behind)) * length
    shape = (rows, args.micro_batch_size, config.hidden_size)
    return torch.empty(shape, dtype=config.params_dtype, device=_META)
