"""Does the operations of a step's plan, around and within Megatron's own schedule."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from loongplug.data.microbatch import Microbatch, Unit
from loongplug.hetero.decoder_hooks import FeaturesNode, Waiting, before_backward, unwrapped
from loongplug.hetero.edge import Edges
from loongplug.hetero.encoder_of_step import EncoderOfStep, units_of
from loongplug.hetero.exchange import Exchange
from loongplug.hetero.executed_step import ExecutedStep
from loongplug.hetero.host_moves import HostMoves
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Await,
    Encode,
    EncodeInForward,
    EncodePieces,
    EncoderBackward,
    GatherFeatures,
    GatherWeights,
    GiveBack,
    HandOn,
    KeepGradient,
    Offload,
    Operation,
    PiecesBackward,
    ReceiveFeatures,
    ReceiveGradient,
    ReduceGradients,
    Release,
    Reload,
    ScatterGradients,
    SendFeatures,
    SendGradients,
    StepPlan,
    TakeBack,
    TakeFeatures,
    TakeStates,
    When,
    backward,
    before_pass,
    forward,
    gradient,
)
from loongplug.hetero.piece_edges import own_storage
from loongplug.hetero.piece_work import PiecesOfStep, Streaming
from loongplug.hetero.stage_links import StageLinks, StageUnit
from loongplug.models.entries import Entry
from loongplug.models.features import Features
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.platform import Platform

Schedule = Callable[..., Any]  # a forward-backward function of Megatron's
# Makes the plan of a step; called as Engine.plan is.
Planned = Callable[..., StepPlan]


class Executor:
    """One rank's encoder side of a run's steps; the decoder's feature source.

    The plan says what is done, and when; here is how. Collective where the plan's operations are:
    every rank of the exchange's group has a plan that enters the same ones in the same order.
    """

    def __init__(
        self,
        planned: Planned,
        exchange: Exchange | Edges,
        *,
        entry: Entry,
        taps: int,
        outside_schedule: bool,
        platform: Platform,
        evaluating: Exchange | Edges | None = None,
        links: StageLinks | None = None,
        recorder: Recorder = NOTHING,
    ) -> None:
        """``planned`` is called with a step's ``encoder_replicas``, ``training`` and ``trains``.

        ``evaluating``: what steps of an evaluation exchange by, where that is not ``exchange``.
        ``entry`` is the encoder's, ``taps`` are how many features of a token it has for the
        decoder's first layers. ``outside_schedule``: the schedule has nothing to gather or to
        reduce for it, in any step and on any rank. ``links`` are to the encoder's other stages,
        None where it has one.
        """
        self._planned = planned
        self._exchange = exchange
        self._evaluating = evaluating
        self._entry = entry
        self._taps = taps
        self._outside_schedule = outside_schedule
        self._platform = platform
        self._links = links
        self._recorder = recorder
        self.streaming: Streaming | None = None  # where steps of training may stream
        self.host = HostMoves(platform)
        # Whether an encoder on ranks of its own does; None for one whose ranks see it. On ranks of
        # a stage, whether anything in it or before it does, and whether anything before it does.
        self.encoder_trains: bool | None = None
        self.trains_before = False
        self._step: ExecutedStep | None = None

    def around(self, schedule: Schedule) -> Schedule:
        """``schedule`` with the plan's operations around and within it.

        The step's microbatches are taken from the first chunk's iterator beforehand. What Megatron
        does to all gradients once the schedule is through waits for the end of the plan.
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
            with self._recorder.span("data", "the step's microbatches"):
                microbatches: list[Microbatch] = [next(first) for _ in range(num_microbatches)]
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

    def instead(self, microbatch_pieces: Mapping[bool, int]) -> Schedule:
        """The schedule of a rank that encodes and does not decode.

        A microbatch of all decoder replicas is so many ``microbatch_pieces`` from its iterator,
        by whether the step is one of training.
        """

        def forward_backward(
            *,
            data_iterator: Any,
            model: Any,
            num_microbatches: int,
            forward_only: bool = False,
            force_all_reduce: bool | None = False,
            **_: Any,
        ) -> list[Any]:
            chunks = model if isinstance(model, list) else [model]
            pieces = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
            count = num_microbatches * microbatch_pieces[not forward_only]
            with self._recorder.span("data", "the step's microbatches"):
                microbatches: list[Microbatch] = [next(pieces) for _ in range(count)]
            self.begin(chunks[0], microbatches, training=not forward_only)
            self.end()
            finalize = get_model_config(chunks[0]).finalize_model_grads_func
            if not forward_only and finalize is not None:
                none = torch.zeros([], dtype=torch.int, device=self._platform.device)
                finalize(chunks, none, force_all_reduce=force_all_reduce)
            return []

        return forward_backward

    def begin(self, chunk: Any, microbatches: list[Microbatch], *, training: bool) -> None:
        """A step begins. ``chunk`` is the rank's first, as Megatron has wrapped it."""
        model = unwrapped(chunk)
        encoder = EncoderOfStep(chunk, model, entry=self._entry, training=training)
        if self.encoder_trains is not None:
            encoder.trains = training and self.encoder_trains
            encoder.trains_before = training and self.trains_before
        units = [each.units[self._entry.name] for each in microbatches]
        spec = units_of(microbatches, model=model, entry=self._entry, taps=self._taps)
        pieces = None
        if self.streaming is not None and training:
            pieces = self.streaming.pieces(microbatches, spec=spec, encoder=encoder)
        plan = self._planned(
            encoder_replicas=spec.encoder_replicas,
            training=training,
            trains=encoder.trains,
            rows=tuple(_rows(unit) for unit in units),
            **({} if pieces is None else {"stream": pieces.stream}),
        )
        if self._outside_schedule:
            chunk.outside_schedule.add(self._entry.name)
        exchange = self._exchange if training or self._evaluating is None else self._evaluating
        self._step = ExecutedStep(
            plan=plan,
            encoder=encoder,
            exchange=exchange,
            model=model,
            microbatches=microbatches,
            spec=spec,
            pieces=pieces,
        )
        exchange.begin(spec, trains=encoder.trains)
        if self._links is not None:
            stage_units = [
                StageUnit(rows=encoder.states(unit), microbatch=each.number)
                for unit, each in zip(units, microbatches, strict=True)
            ]
            self._links.begin(stage_units, dtype=spec.dtype, comes_back=encoder.trains)
        self._do(BEGIN)

    def watched(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """``forward_step`` with the events of the passes through the rank's first chunk."""
        number = 0

        def watching(data_iterator: Any, model: Any, *args: Any, **options: Any) -> Any:
            nonlocal number
            if unwrapped(model) is not self._now.model:
                return forward_step(data_iterator, model, *args, **options)
            here, number = number, number + 1
            self._do(forward(here))
            output, loss = forward_step(data_iterator, model, *args, **options)
            if backward(here) in self._now.plan:
                before_backward(output, lambda: self._do(backward(here)))
            return output, loss

        return watching

    @property
    def pieces(self) -> PiecesOfStep | None:
        """Of the step that has begun; None where it does not stream."""
        return self._now.pieces

    def before_pass(self, number: int) -> None:
        """Before a pass of the stage, where a step streams; see :class:`~.bubbles.BubbleWork`."""
        self._do(before_pass(number))

    def features(self, number: int) -> Features:
        """For the decoder's graph, which hands their gradient to this step."""
        step = self._now
        rows = self._taken(number)
        return Features.unpacked(rows, hidden=step.model.text_decoder.config.hidden_size)

    def end(self) -> None:
        """The schedule has ended, without an error."""
        self._do(END)
        self._now.exchange.drain()
        if self._now.pieces is not None:
            self._now.pieces.end()
        if self._links is not None:
            self._links.drain()
        self._now.assert_done()
        self._step = None

    @property
    def _now(self) -> ExecutedStep:
        assert self._step is not None, "no step has begun"
        return self._step

    def _taken(self, unit: int) -> Tensor:
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
        self._do(gradient(unit))
        self._now.arrived = None

    def _do(self, when: When) -> None:
        for operation in self._now.plan.get(when, ()):
            self._operate(operation)

    def _operate(self, operation: Operation) -> None:
        step = self._now
        match operation:
            case Encode(unit=unit, movable=movable, joined=joined):
                self._encode(unit, movable=movable, joined=joined)
            case GatherFeatures(units=units, to_host=to_host):
                self._gather(units, to_host=to_host)
            case TakeFeatures(unit=unit):
                step.taken[unit] = step.features.pop(unit)
            case KeepGradient(unit=unit):
                assert step.arrived is not None
                step.gradients[unit], step.arrived = step.arrived, None
            case ScatterGradients(units=units):
                self._scatter(units)
            case TakeStates() | HandOn() | TakeBack() | GiveBack():
                self._exchange_with_stage(operation)
            case EncoderBackward(unit=unit, more=more, joined=joined):
                own, came = step.own.pop(unit), step.own_gradients.pop(unit)
                if joined:
                    came = torch.cat([came, *map(step.own_gradients.pop, joined)])
                step.encoder.backward(own, came, more=more)
            case Offload() | Release() | Reload() | Await():
                self.host.operate(operation, step)
            case ReceiveFeatures(unit=unit, pieces=pieces):
                step.features[unit] = step.of_pieces.receive(pieces)
            case SendGradients(unit=unit, pieces=pieces):
                step.of_pieces.give_back(pieces, step.gradients.pop(unit))
            case EncodePieces(pieces=pieces, movable=movable):
                with self.host.saves(step, movable=movable) as saved:
                    step.of_pieces.operate(operation)
                if saved is not None:
                    step.saved[pieces[0]] = list(saved.values())
            case SendFeatures() | ReceiveGradient() | PiecesBackward():
                step.of_pieces.operate(operation)
            case GatherWeights():
                step.encoder.gather_weights()
            case ReduceGradients():
                step.encoder.reduce_gradients()
            case EncodeInForward():
                raise AssertionError("the decoder's forward does it without this executor")

    def _encode(self, unit: int | None, *, movable: bool, joined: tuple[int, ...]) -> None:
        step = self._now
        encoded = None if unit is None else step.microbatches[unit].units[self._entry.name]
        behind = [step.microbatches[each].units[self._entry.name] for each in joined]
        with self.host.saves(step, movable=movable) as saved:
            states = self._handed_on(unit)
            payload = step.encoder.payload(encoded, joined=behind, states=states)
        if saved is not None:
            step.saved[unit] = list(saved.values())
        if step.encoder.trains:
            step.own[unit] = get_gradient_edge(payload)
        if unit is None:
            step.own_gradients[None] = torch.zeros_like(payload)  # [0, width]
        elif encoded is not None and joined:
            parts = payload.detach().split(list(map(step.encoder.tokens, [encoded, *behind])))
            step.payloads |= zip([unit, *joined], parts, strict=True)
        else:
            step.payloads[unit] = payload

    def _handed_on(self, unit: int | None) -> Tensor | None:
        """What the stage before has made of a unit; held on to where it gets a gradient."""
        step = self._now
        if unit is None or unit not in step.states:
            return None
        return step.states[unit] if step.encoder.trains_before else step.states.pop(unit)

    def _gather(self, units: range, *, to_host: bool) -> None:
        step = self._now
        own = [unit for unit in units if unit in step.payloads]
        arrived = step.exchange.gather_variable_shape_embeddings(
            {unit - units.start: step.payloads.pop(unit) for unit in own}, step.spec.part(units)
        )
        if not to_host:
            for unit in sorted(arrived):
                step.features[units.start + unit] = own_storage(arrived.pop(unit))
            return
        features = {units.start + unit: arrived.pop(unit) for unit in sorted(arrived)}
        self.host.features_leave(features)

    def _scatter(self, units: range) -> None:
        step = self._now
        if step.exchange.consumes:
            missing = [unit for unit in units if unit not in step.gradients]
            assert not missing, f"no gradient came for units {missing}"
        found = step.exchange.scatter_variable_shape_embeddings(
            {
                unit - units.start: step.gradients.pop(unit)
                for unit in units
                if unit in step.gradients
            },
            step.spec.part(units),
        )
        step.own_gradients |= {units.start + unit: each for unit, each in found.items()}

    def _exchange_with_stage(self, operation: TakeStates | HandOn | TakeBack | GiveBack) -> None:
        step, links, unit = self._now, self._links, operation.unit
        assert links is not None, "the encoder has stages"
        match operation:
            case TakeStates():
                step.states[unit] = links.take(unit)
            case HandOn():
                links.hand_on(unit, step.payloads.pop(unit))
            case TakeBack():
                step.own_gradients[unit] = links.take_back(unit)
            case GiveBack():
                links.give_back(unit, step.states.pop(unit).grad)


def _rows(unit: Unit) -> int:
    """Of the encoder's input, what this rank encodes of it."""
    return 0 if unit.media is None else len(unit.media.rows)
