"""One pipeline stage at work on tensors without memory, in Megatron's own schedules.

Layers are those without TransformerEngine, attention keeps what flash kernels keep.
"""

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import combined_1f1b, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from loongplug.data.microbatch import Microbatch
from loongplug.estimate.live_bytes import DECODER
from loongplug.estimate.tracing import Away, drop, tracing
from loongplug.hetero.recorded_schedule import Turn
from loongplug.models.features import Features, PlacedFeatures, TokenPlaces
from loongplug.models.layers.linear import DelayedGradient
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform.platforms import Platform
from loongplug.schedule.chunk_plan import plan_schedules
from loongplug.schedule.tensor_offload import offload_layers
from loongplug.training.forward_step import ForwardStep
from loongplug.training.provider import tensor_offload_of
from loongplug.training.rules.rule import decoder_layout_of

_META = torch.device("meta")


class TurnBytes(NamedTuple):
    """Bytes of a turn of work: how many ``more`` there are behind it, and the ``most`` in it."""

    more: int
    most: int


class TracedStage:
    """The chunks of one rank, which has to be Megatron's current one, and what tapes see of them.

    All microbatches are ``like`` one. Features are there before, with a gradient where the encoder
    is among ``features_train``.
    """

    def __init__(
        self,
        args: Namespace,
        model: Any,
        chunks: Sequence[MultimodalModel],
        *,
        like: Microbatch,
        features_train: Collection[str],
    ) -> None:
        self._args = args
        self._chunks = chunks
        self._like = like
        # Tokens of media are spread evenly over the parts of the sequence.
        parts = decoder_layout_of(args).sequence_shards(sequence_parallel=args.sequence_parallel)
        self._hidden, dtype = chunks[0].config.hidden_size, chunks[0].config.params_dtype
        self._payloads: list[tuple[Tensor, int]] = []  # of features, and tokens of the sequence
        for name, unit in like.units.items():
            shape = -(-unit.tokens // parts), (1 + len(model.encoder(name).taps())) * self._hidden
            payload = torch.empty(shape, dtype=dtype, device=_META)
            if name in features_train:
                payload.requires_grad_().register_post_accumulate_grad_hook(drop)
            self._payloads.append((payload, unit.tokens))
        if chunks[0].pre_process:
            chunks[0].placed = self._placed  # type: ignore[method-assign]

    def _placed(self, *_: Any, **__: Any) -> list[PlacedFeatures]:
        """See :meth:`MultimodalModel.placed`; where the places lie is of no account."""
        found = []
        for payload, count in self._payloads:
            places = torch.empty(3, len(payload), dtype=torch.int64, device=_META)
            rows, sample, position = places.unbind()
            found.append(
                PlacedFeatures(
                    features=Features.unpacked(payload, hidden=self._hidden),
                    places=TokenPlaces(rows=rows, sample=sample, position=position, count=count),
                )
            )
        return found

    def alone(self, chunk: MultimodalModel) -> tuple[TurnBytes, TurnBytes]:
        """A forward and a backward of a chunk that have nothing to do with others."""
        with tracing(self._args, chunk, region=DECODER) as tape:
            entering = self._received(chunk)
            tape.restart()
            output, _ = schedules.forward_step(
                ForwardStep(cast(Platform, Away(tape))),
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
            kept, forward = tape.live[DECODER], tape.most
            gradient = self._sent(chunk)
            tape.restart()
            schedules.backward_step(entering, output, gradient, chunk.config)
            return TurnBytes(kept, forward), TurnBytes(-kept, tape.most - kept)

    def step(self, order: Sequence[Turn], like: Sequence[int]) -> tuple[list[TurnBytes], int]:
        """The turns of a step, and the most bytes that tensors have on the host.

        Of a shorter step's ``order`` each is ``like`` the turn of that number. For passes that
        depend on each other, by the overlap or by tensors that leave the device and come back.
        Chunks are changed as the run changes them.
        """
        model, combined = [*self._chunks], combined_1f1b.combined_forward_backward_step
        found: list[tuple[int, int]] = []  # held behind each turn and before all, and the most

        def noted(work: Callable[..., Any]) -> Callable[..., Any]:
            def turn(*args: Any, **kwargs: Any) -> Any:
                found.append((tape.live[DECODER], tape.most))
                tape.restart()
                return work(*args, **kwargs)

            return turn

        with tracing(self._args, *model, region=DECODER) as tape:
            away = Away(tape)
            self._prepare(cast(Platform, away), order)
            with (
                patch.object(P2PCommunicator, "_communicate", self._messages(order)),
                patch.object(schedules, "forward_step", noted(schedules.forward_step)),
                patch.object(schedules, "backward_step", noted(schedules.backward_step)),
                patch.object(combined_1f1b, combined.__name__, noted(combined)),
            ):
                schedules.get_forward_backward_func()(
                    forward_step_func=ForwardStep(cast(Platform, away)),
                    data_iterator=[self._microbatches(chunk) for chunk in model],
                    model=model,
                    num_microbatches=sum(turn.forward is not None for turn in order) // len(model),
                    seq_length=self._like.split.length,
                    micro_batch_size=self._args.micro_batch_size,
                )
            found.append((tape.live[DECODER], tape.most))
        assert len(found) == len(order) + 1, "the schedule has other turns"
        turns, before = [], 0
        for behind, most in (found[1 + number] for number in like):
            turns.append(TurnBytes(more=behind - before, most=most - before))
            before = behind
        return turns, away.host.most

    def _prepare(self, platform: Platform, order: Sequence[Turn]) -> None:
        """Have tensors leave the chunks, and their passes overlap, as in the run."""
        offload = tensor_offload_of(self._args, platform=platform)
        if offload is not None:
            forwards = [turn.forward for turn in order if turn.forward is not None]
            backwards = [turn.backward for turn in order if turn.backward is not None]
            offload.expect([forwards.index(each) for each in backwards])
        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, DelayedGradient):  # theirs go where the others go
                    module.register_wgrad_accumulation_and_reduce_hooks(
                        partial(drop, module.weight)
                    )
            if offload is not None:
                offload_layers(chunk, offload)
            if self._args.overlap_moe_expert_parallel_comm:
                plan_schedules(chunk, offload=offload)

    def _messages(self, order: Sequence[Turn]) -> Callable[..., Any]:
        """A stand-in for messages: other stages send at once, and what is sent is theirs."""
        chunks = self._chunks
        forwards = (chunks[turn.forward.chunk] for turn in order if turn.forward is not None)
        backwards = (chunks[turn.backward.chunk] for turn in order if turn.backward is not None)
        outputs = (self._received(chunk) for chunk in forwards if not chunk.pre_process)
        gradients = (self._sent(chunk) for chunk in backwards if not chunk.post_process)

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

    def _microbatches(self, chunk: MultimodalModel) -> Iterator[Microbatch]:
        """As many microbatches as are asked for; nothing else holds one."""
        return iter(partial(self._microbatch, chunk), None)

    def _microbatch(self, chunk: MultimodalModel) -> Microbatch:
        positions = torch.empty(self._like.position_ids.shape, dtype=torch.int64, device=_META)
        ids = torch.empty_like(positions[0])
        return replace(
            self._like,
            input_ids=ids,
            position_ids=positions,
            labels=ids if chunk.post_process else None,
            loss_mask=ids.float(),
        )

    @property
    def buffers(self) -> int:
        """Bytes that Megatron's schedules hold between stages besides what a pass takes and leaves.

        1F1B: the gradient that was sent last. Interleaved, with several chunks: what has come for
        the next forward and the next backward, and what was sent by the last ones.
        """
        moved = [
            [0 if each is None else each.nbytes for each in (self._received(x), self._sent(x))]
            for x in self._chunks
        ]
        return moved[0][0] if len(moved) == 1 else 2 * max(map(sum, moved))

    def _received(self, chunk: MultimodalModel) -> Tensor | None:
        return None if chunk.pre_process else self._states(chunk, behind=False).requires_grad_()

    def _sent(self, chunk: MultimodalModel) -> Tensor | None:
        return None if chunk.post_process else self._states(chunk, behind=True)

    def _states(self, chunk: MultimodalModel, *, behind: bool) -> Tensor:
        """States before or ``behind`` its layers, with the deepstack streams that are left."""
        config = chunk.text_decoder.config
        _, rows, length = self._like.position_ids.shape
        if config.sequence_parallel:
            length //= config.tensor_model_parallel_size
        stacked = 1 + chunk.text_decoder.travelling(behind=behind)
        shape = (stacked * length, rows, config.hidden_size)
        return torch.empty(shape, dtype=config.params_dtype, device=_META)
