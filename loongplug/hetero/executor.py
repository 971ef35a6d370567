"""Has the operations of a step's plan done around and within Megatron's own schedule."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from loongplug.data.microbatch import Microbatch
from loongplug.hetero.encoder_of_step import EncoderOfStep, units_of
from loongplug.hetero.exchange import AllToAll
from loongplug.hetero.executed_step import ExecutedStep, HostMoves, Streaming
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Operation,
    StepPlan,
    When,
    backward,
    forward,
    gradient,
)
from loongplug.hetero.piece_carrier import Carrier
from loongplug.hetero.step_programs import DecoderPass
from loongplug.models.entries import Entry
from loongplug.models.features import Features
from loongplug.models.multimodal import MultimodalModel
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.platform.platforms import Platform

Schedule = Callable[..., Any]  # a forward-backward function of Megatron's

_ONE_TO_A_MICROBATCH = MappingProxyType({True: 1, False: 1})


@dataclass(kw_only=True, eq=False)
class Executor:
    """One rank's encoder side of a run's steps; the decoder's feature source.

    The plan says what is done, and when; :class:`ExecutedStep` does it. Collective where the plan's
    operations are: every rank of the exchange's group has a plan that enters the same ones in the
    same order.

    ``planned`` is called with a step's ``encoder_replicas``, ``training`` and ``trains``.
    ``exchange`` is of steps that exchange, ``carrier`` of those whose pieces go from rank to rank.
    ``taps`` are how many features of a token the encoder has for the decoder's first layers.
    ``outside_schedule``: the schedule has nothing to gather or to reduce for it, in any step and on
    any rank. With ``streaming`` steps of training may stream.
    """

    planned: Callable[..., StepPlan]
    exchange: AllToAll | None
    entry: Entry  # the encoder's
    taps: int
    outside_schedule: bool
    platform: Platform
    carrier: Carrier | None = None
    streaming: Streaming | None = None
    recorder: Recorder = NOTHING
    # Whether an encoder on ranks of its own does; None for one whose ranks see it. On ranks of
    # a stage, whether anything in it or before it does, and whether anything before it does.
    encoder_trains: bool | None = field(default=None, init=False)
    trains_before: bool = field(default=False, init=False)
    _step: ExecutedStep | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.host = HostMoves(self.platform)

    def around(
        self, schedule: Schedule, *, pieces: Mapping[bool, int] = _ONE_TO_A_MICROBATCH
    ) -> Schedule:
        """``schedule`` with the plan's operations around and within it.

        The step's microbatches are taken from the first chunk's iterator beforehand: so many
        ``pieces`` for each, by whether the step is one of training. What Megatron does to all
        gradients once the schedule is through waits for the end of the plan.
        """

        def forward_backward(
            *,
            forward_step_func: Callable[..., Any],
            data_iterator: Any,
            model: Any,
            num_microbatches: int,
            forward_only: bool = False,
            **options: Any,
        ) -> Any:
            chunk = model[0] if isinstance(model, list) else model
            several = isinstance(data_iterator, list)
            first, *others = data_iterator if several else [data_iterator]
            count = num_microbatches * pieces[not forward_only]
            with self.recorder.span("data", "the step's microbatches"):
                microbatches: list[Microbatch] = [next(first) for _ in range(count)]
            self.begin(chunk, microbatches, training=not forward_only)
            replayed: Iterator[Microbatch] = iter(microbatches)
            config = get_model_config(chunk)
            finalize, waiting = config.finalize_model_grads_func, Waiting()
            config.finalize_model_grads_func = None if finalize is None else waiting
            try:
                result = schedule(
                    forward_step_func=self.watched(forward_step_func),
                    data_iterator=[replayed, *others] if several else replayed,
                    model=model,
                    num_microbatches=num_microbatches,
                    forward_only=forward_only,
                    **options,
                )
            finally:
                config.finalize_model_grads_func = finalize
            self.end()
            waiting.release(finalize)
            return result

        return forward_backward

    def instead(self, pieces: Mapping[bool, int]) -> Schedule:
        """The schedule of a rank that encodes and does not decode; ``pieces`` as in `around`."""

        def no_passes(
            *, model: Any, forward_only: bool, force_all_reduce: bool | None = False, **_: Any
        ) -> list[Any]:
            chunks = model if isinstance(model, list) else [model]
            finalize = get_model_config(chunks[0]).finalize_model_grads_func
            if not forward_only and finalize is not None:
                none = torch.zeros([], dtype=torch.int, device=self.platform.device)
                finalize(chunks, none, force_all_reduce=force_all_reduce)
            return []

        return self.around(no_passes, pieces=pieces)

    def begin(self, chunk: Any, microbatches: list[Microbatch], *, training: bool) -> None:
        """A step begins. ``chunk`` is the rank's first, as Megatron has wrapped it."""
        model = unwrapped(chunk)
        encoder = EncoderOfStep(chunk, model, entry=self.entry, training=training)
        if self.encoder_trains is not None:
            encoder.trains = training and self.encoder_trains
            encoder.trains_before = training and self.trains_before
        units = [each.units[self.entry.name] for each in microbatches]
        spec = units_of(microbatches, model=model, entry=self.entry, taps=self.taps)
        streaming = self.streaming if training else None
        streamed = None if streaming is None else streaming.planner.plan([x.grids for x in units])
        stream = None
        if streaming is not None and streamed is not None:
            assert encoder.trains == streamed.trains, "counted from the flags that freeze"
            stream = streamed.stream(streaming.replica)
        crossings = None
        if self.carrier is not None:
            crossings = self.carrier.crossings(spec, training, streamed)
        plan = self.planned(
            encoder_replicas=spec.encoder_replicas,
            training=training,
            trains=encoder.trains,
            trains_before=encoder.trains_before,
            rows=tuple(0 if x.media is None else int(x.media.grids.prod(-1).sum()) for x in units),
            stream=stream,
        )
        if self.outside_schedule:
            chunk.outside_schedule.add(self.entry.name)
        self._step = ExecutedStep(
            plan=plan,
            encoder=encoder,
            model=model,
            units=units,
            spec=spec,
            pieces=None if stream is None else stream.pieces,
            streamed=streamed,
            exchange=self.exchange,
            carrier=None if crossings is None else self.carrier,
            host=self.host,
        )
        if self.carrier is not None and crossings is not None:
            states: list[tuple[int, int]] = []
            if self.carrier.links:
                each_with = zip(units, microbatches, strict=True)
                states = [(encoder.states(unit), each.number) for unit, each in each_with]
            self.carrier.begin(crossings, states=states, trains=encoder.trains)
        self.do(BEGIN)

    def watched(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """``forward_step`` with the events of the passes through the rank's first chunk."""
        number = 0

        def watching(data_iterator: Any, model: Any, *args: Any, **options: Any) -> Any:
            nonlocal number
            if unwrapped(model) is not self._now.model:
                return forward_step(data_iterator, model, *args, **options)
            here, number = number, number + 1
            self.do(forward(here))
            output, loss = forward_step(data_iterator, model, *args, **options)
            if backward(here) in self._now.plan:
                if isinstance(output, AbstractSchedulePlan):  # of how to come to an output
                    output.on_backward(lambda: self.do(backward(here)))
                elif output.requires_grad:
                    output.register_hook(lambda gradient_of_output: self.do(backward(here)))
            return output, loss

        return watching

    @property
    def streamed_passes(self) -> tuple[DecoderPass, ...] | None:
        """The passes of this stage of the decoder in the step; None where it does not stream."""
        streamed = self._now.streamed
        if streamed is None or self.streaming is None:
            return None
        return streamed.passes[self.streaming.stage]

    def features(self, number: int) -> Features:
        """Features for the decoder's graph, which hands their gradient to this step."""
        step = self._now
        rows = self.taken(number)
        return Features.unpacked(rows, hidden=step.model.text_decoder.config.hidden_size)

    def end(self) -> None:
        """The schedule has ended, without an error."""
        self.do(END)
        if self._now.carrier is not None:
            self._now.carrier.wire.drain()
        self._now.assert_done()
        self._step = None

    @property
    def _now(self) -> ExecutedStep:
        assert self._step is not None, "no step has begun"
        return self._step

    def taken(self, unit: int) -> Tensor:
        """A unit's features, [rows, width]; nothing but the graph's own operations holds them."""
        if not self._now.encoder.trains:
            return self._now.taken.pop(unit)
        # The graph goes no further than inputs that need it: one without values. A leaf with the
        # features would keep them until its backward.
        found: Tensor = FeaturesNode.apply(
            torch.empty(0, requires_grad=True),
            partial(self._now.taken.pop, unit),
            partial(self._gradient_came, unit),
        )
        return found

    def _gradient_came(self, unit: int, gradient_of_features: Tensor) -> None:
        self._now.arrived = gradient_of_features
        del gradient_of_features
        self.do(gradient(unit))
        self._now.arrived = None

    def do(self, when: When) -> None:
        for operation in self._now.plan.get(when, ()):
            self.operate(operation)

    def operate(self, operation: Operation) -> None:
        self._now.operate(operation)


def unwrapped(chunk: Any) -> MultimodalModel:
    """Megatron hands chunks on with or without its wrappers."""
    model: MultimodalModel = get_attr_wrapped_model(chunk, "encoders", return_model_obj=True)
    return model


class FeaturesNode(torch.autograd.Function):
    """Where features come from, and their gradient goes to, in the decoder's graph."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, take: Callable[[], Tensor], came: Callable[[Tensor], None]
    ) -> Tensor:
        """``take`` gives the features; ``came`` is called with their gradient."""
        ctx.came = came
        return take()

    @staticmethod
    def backward(ctx: Any, gradient_of_features: Tensor) -> tuple[None, None, None]:
        """Nothing goes further in this graph."""
        ctx.came(gradient_of_features)
        return None, None, None


class Waiting:
    """Stands in for a function that is to be called later, with what it was called with."""

    def __init__(self) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append((args, kwargs))

    def release(self, function: Callable[..., Any] | None) -> None:
        for args, kwargs in self._calls:
            assert function is not None
            function(*args, **kwargs)
