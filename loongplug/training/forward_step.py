"""What Megatron's schedules call for a microbatch, its forward and loss, and for a step of them."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from loongplug.data.microbatch import Microbatch
from loongplug.data.sample import Grid
from loongplug.models.layers.context.row import context_row
from loongplug.models.layers.inputs import PackedSegments, pack_segments
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.platform.devices import to_device
from loongplug.platform.platforms import Platform

LossReport = tuple[Tensor, Tensor, dict[str, Tensor]]
OnLoss = Callable[[Microbatch, LossReport], None]
# Operations of samples of so many tokens, with media of these grids by encoder.
Work = Callable[[Sequence[int], Mapping[str, Sequence[Grid]]], int]
Schedule = Callable[..., Any]  # a forward-backward function of Megatron's


def token_loss(loss_mask: Tensor, losses: Tensor) -> LossReport:
    """Sum of the ``losses`` of the tokens that count, their number (int32), and both for the log.

    Megatron divides the gradients by the number of such tokens of the whole global batch (all
    microbatches, all data parallel ranks), so the loss is the mean over tokens however the batch
    is split. Both inputs are [b, s] float32; the mask is 1 where a token counts.
    """
    total = (losses.float() * loss_mask).sum()
    tokens = loss_mask.sum()
    return (
        total,
        tokens.to(torch.int32),
        {"lm loss": torch.stack([total.detach(), tokens])},
    )


def packed_segments(microbatch: Microbatch, *, device: torch.device) -> PackedSegments | None:
    """A pack's segments as the decoder takes them, on ``device``; None for padded rows.

    Of rows whose tokens lie on several ranks, padded ones too: the row, and what is held here.
    """
    own, segments = microbatch.own, microbatch.segments
    padding = 0 if segments is None else microbatch.capacity - microbatch.tokens
    if own is not None:
        # A padded row is one causal segment, in which padding stands behind all that counts.
        lengths = (own.split.length,) if segments is None else segments
        return PackedSegments(
            qkv_format="sbhd" if segments is None else "thd",
            padding=padding,
            context=context_row(own.split, lengths, rank=own.rank, device=device),
        )
    if segments is None:
        return None
    return pack_segments(segments, device=device, padding=padding)


class ForwardStep:
    """Take the next microbatch, run this rank's chunk on it, count its tokens.

    ``on_loss`` is called with each microbatch and its loss, where the losses are made; ``work``
    says how many operations samples take.
    """

    def __init__(
        self, platform: Platform, *, work: Work | None = None, on_loss: OnLoss | None = None
    ) -> None:
        self._platform = platform
        self._on_loss = on_loss
        self._work = work
        # Of all training microbatches, first stage only: tokens without padding and with it.
        self.tokens = 0
        self.capacity = 0
        # Of those since somebody asked for the operations: samples' tokens, and media's grids.
        self._operations = 0
        self._lengths: list[int] = []
        self._grids: defaultdict[str, list[Grid]] = defaultdict(list)
        self.started: float | None = None  # when the first of them was asked for
        # Where losses are made, of the microbatches since somebody cleared it: their sums, and how
        # many tokens of an evaluation counted. On the device.
        self.losses: list[Tensor] = []
        self.valid_tokens: list[Tensor] = []
        # Of training, without a token that counts on any rank: these change nothing.
        self.empty_steps = 0

    def __call__(
        self,
        data_iterator: Iterator[Microbatch],
        model: MegatronModule,
        return_schedule_plan: bool = False,
    ) -> tuple[Tensor | AbstractSchedulePlan, Callable[[Tensor], LossReport]]:
        """Output of this stage and the loss function for the last one.

        In the output's place the plan of how to come to it, for a schedule that asks for that
        by Megatron's ``return_schedule_plan``.
        """
        if self.started is None:
            self.started = time.monotonic()
        microbatch = next(data_iterator).heard()
        # Asked again each time: on CUDA, Megatron chooses the rank's device while it starts.
        device = self._platform.device

        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else to_device(tensor, device)

        loss_mask = there(microbatch.loss_mask)
        # Each of a rank's virtual chunks sees the same microbatch; only the first counts it.
        if model.training and get_attr_wrapped_model(model, "pre_process"):
            self.tokens += microbatch.tokens
            self.capacity += microbatch.capacity
            self._lengths += microbatch.lengths
            for name, unit in microbatch.units.items():
                self._grids[name] += unit.grids
        output = (model.build_schedule_plan if return_schedule_plan else model)(
            there(microbatch.input_ids),
            there(microbatch.position_ids),
            units=microbatch.units,
            number=microbatch.number,
            labels=there(microbatch.labels),
            loss_mask=loss_mask,
            packed_seq_params=packed_segments(microbatch, device=device),
        )
        if microbatch.labels is None:
            return output, _no_loss
        assert loss_mask is not None, "it comes with the labels"
        return output, partial(self._loss, microbatch, loss_mask, training=model.training)

    @property
    def operations(self) -> int:
        """Floating point operations of all training microbatches, on all ranks of the replica."""
        if self._work is not None:
            self._operations += self._work(self._lengths, self._grids)
        self._lengths.clear()
        self._grids.clear()
        return self._operations

    def _loss(
        self, microbatch: Microbatch, loss_mask: Tensor, losses: Tensor, *, training: bool
    ) -> LossReport:
        report = token_loss(loss_mask, losses)
        total, tokens, _ = report
        if training:
            self.losses.append(total.detach())
        else:
            self.valid_tokens.append(tokens)
        if self._on_loss is not None:
            self._on_loss(microbatch, report)
        return report


def _no_loss(output: Tensor) -> LossReport:
    """The loss function of a stage that is not the last, which Megatron does not call."""
    raise AssertionError("the loss was asked of a stage without labels")


class StepRows:
    """Tells the pipeline's schedule how long the rows of each of its steps are.

    All microbatches of such a step have one length (:class:`RowLengths`), and every stage finds it
    in the first: stages that expect it need not send each other shapes.
    """

    recorder: Recorder = NOTHING

    def schedules(self, get_schedule: Callable[..., Schedule]) -> Callable[..., Schedule]:
        def get_forward_backward_func(*args: object, **kwargs: object) -> Schedule:
            schedule = get_schedule(*args, **kwargs)

            def forward_backward(*, data_iterator: Any, **options: Any) -> Any:
                several = isinstance(data_iterator, list)
                first, *others = data_iterator if several else [data_iterator]
                with self.recorder.span("data", "the step's first microbatch"):
                    microbatch: Microbatch = next(first)
                # Megatron's iterators have a next, and nothing else.
                again: Iterator[Microbatch] = chain((microbatch,), iter(partial(next, first), None))
                length = microbatch.split.length
                return schedule(
                    data_iterator=[again, *others] if several else again,
                    **options | {"seq_length": length, "decoder_seq_length": length},
                )

            return forward_backward

        return get_forward_backward_func
