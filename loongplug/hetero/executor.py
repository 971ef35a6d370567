"""Does the operations of a step's plan, around and within Megatron's own schedule."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from loongplug.data.microbatch import Microbatch
from loongplug.hetero.carrier import Carrier, StageSpec
from loongplug.hetero.decoder_hooks import FeaturesNode, Waiting, before_backward, unwrapped
from loongplug.hetero.encoder_of_step import EncoderOfStep, units_of
from loongplug.hetero.exchange import AllToAll, own_storage
from loongplug.hetero.executed_step import ExecutedStep, HostMoves, Streaming
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Backward,
    Cargo,
    Encode,
    Exchange,
    Hand,
    Kept,
    Move,
    Operation,
    Receive,
    Send,
    StepPlan,
    To,
    Weights,
    When,
    backward,
    forward,
    gradient,
)
from loongplug.hetero.step_costs import DecoderPass
from loongplug.hetero.wire import Wire
from loongplug.models.entries import Entry
from loongplug.models.features import Features
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.platform import Platform

Schedule = Callable[..., Any]  # a forward-backward function of Megatron's

_ONE_TO_A_MICROBATCH = MappingProxyType({True: 1, False: 1})


class Executor:
    """One rank's encoder side of a run's steps; the decoder's feature source.

    The plan says what is done, and when; here is how. Collective where the plan's operations are:
    every rank of the exchange's group has a plan that enters the same ones in the same order.
    """

    def __init__(
        self,
        planned: Callable[..., StepPlan],
        exchange: AllToAll | None,
        *,
        entry: Entry,
        taps: int,
        outside_schedule: bool,
        platform: Platform,
        carrier: Carrier | None = None,
        streaming: Streaming | None = None,
        recorder: Recorder = NOTHING,
    ) -> None:
        """``planned`` is called with a step's ``encoder_replicas``, ``training`` and ``trains``.

        ``exchange`` is of steps that exchange, ``carrier`` of those whose pieces go from rank to
        rank. ``entry`` is the encoder's, ``taps`` are how many features of a token it has for the
        decoder's first layers. ``outside_schedule``: the schedule has nothing to gather or to
        reduce for it, in any step and on any rank. With ``streaming`` steps of training may stream.
        """
        self._planned = planned
        self._exchange = exchange
        self.carrier = carrier
        self._entry = entry
        self._taps = taps
        self._outside_schedule = outside_schedule
        self._platform = platform
        self._recorder = recorder
        self.streaming = streaming
        self.host = HostMoves(platform)
        # Whether an encoder on ranks of its own does; None for one whose ranks see it. On ranks of
        # a stage, whether anything in it or before it does, and whether anything before it does.
        self.encoder_trains: bool | None = None
        self.trains_before = False
        self._step: ExecutedStep | None = None

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
            with self._recorder.span("data", "the step's microbatches"):
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
                none = torch.zeros([], dtype=torch.int, device=self._platform.device)
                finalize(chunks, none, force_all_reduce=force_all_reduce)
            return []

        return self.around(no_passes, pieces=pieces)

    def begin(self, chunk: Any, microbatches: list[Microbatch], *, training: bool) -> None:
        """A step begins. ``chunk`` is the rank's first, as Megatron has wrapped it."""
        model = unwrapped(chunk)
        encoder = EncoderOfStep(chunk, model, entry=self._entry, training=training)
        if self.encoder_trains is not None:
            encoder.trains = training and self.encoder_trains
            encoder.trains_before = training and self.trains_before
        units = [each.units[self._entry.name] for each in microbatches]
        spec = units_of(microbatches, model=model, entry=self._entry, taps=self._taps)
        streaming = self.streaming if training else None
        streamed = None if streaming is None else streaming.planner.plan([x.grids for x in units])
        stream = None
        if streaming is not None and streamed is not None:
            assert encoder.trains == streamed.trains, "counted from the flags that freeze"
            stream = streamed.stream(streaming.replica)
        crossings = None
        if self.carrier is not None:
            crossings = self.carrier.crossings(spec, training, streamed)
        plan = self._planned(
            encoder_replicas=spec.encoder_replicas,
            training=training,
            trains=encoder.trains,
            trains_before=encoder.trains_before,
            rows=tuple(0 if x.media is None else int(x.media.grids.prod(-1).sum()) for x in units),
            stream=stream,
        )
        if self._outside_schedule:
            chunk.outside_schedule.add(self._entry.name)
        self._step = ExecutedStep(
            plan=plan,
            encoder=encoder,
            model=model,
            units=units,
            spec=spec,
            pieces=None if stream is None else stream.pieces,
            streamed=streamed,
            carrier=None if crossings is None else self.carrier,
        )
        if self.carrier is not None and crossings is not None:
            states = None
            if self.carrier.links:
                states = StageSpec(
                    rows=tuple(map(encoder.states, units)),
                    microbatches=tuple(each.number for each in microbatches),
                    dtype=spec.dtype,
                )
            self.carrier.begin(crossings, states, trains=encoder.trains)
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
                before_backward(output, lambda: self.do(backward(here)))
            return output, loss

        return watching

    @property
    def streamed_passes(self) -> tuple[DecoderPass, ...] | None:
        """Of this stage of the decoder in the step under way; None where it does not stream."""
        streamed = self._now.streamed
        if streamed is None or self.streaming is None:
            return None
        return streamed.passes[self.streaming.stage]

    def features(self, number: int) -> Features:
        """For the decoder's graph, which hands their gradient to this step."""
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
        """What the plan has there."""
        for operation in self._now.plan.get(when, ()):
            self.operate(operation)

    def operate(self, operation: Operation) -> None:
        """Do one of the plan's operations."""
        step = self._now
        match operation:
            case Encode(pieces=pieces, movable=movable):
                self._encode(pieces, movable=movable)
            case Backward(pieces=pieces, more=more):
                self._backward(pieces, more=more)
            case Send(what=Cargo.STATE_GRADIENTS as what, piece=piece):
                states = step.states.pop(piece)
                if len(states):  # else they have no gradient
                    assert states.grad is not None, f"piece {piece} has no gradient"
                    self._wire.send(what, piece, states.grad)
            case Send(what=what, piece=piece):
                leaving = step.gradients if what is Cargo.GRADIENTS else step.payloads
                self._wire.send(what, piece, leaving.pop(piece))
            case Receive(what=what, piece=piece):
                coming = {Cargo.FEATURES: step.features, Cargo.STATES: step.states}
                coming.get(what, step.own_gradients)[piece] = self._wire.receive(what, piece)
            case Exchange(what=Cargo.FEATURES, pieces=pieces, to_host=to_host):
                self._gather(pieces, to_host=to_host)
            case Exchange(pieces=pieces):
                self._scatter(pieces)
            case Hand(what=Cargo.FEATURES, microbatch=microbatch):
                self._features_to_decoder(microbatch)
            case Hand(microbatch=microbatch):
                self._gradient_of_decoder(microbatch)
            case Move(to=to, what=what, pieces=pieces):
                self.host.move(to, what, pieces, step)
            case Weights(gather=True):
                step.encoder.gather_weights()
            case Weights():
                step.encoder.reduce_gradients()

    def _encode(self, pieces: tuple[int, ...], *, movable: bool) -> None:
        step = self._now
        units = list(map(step.unit, pieces))
        with self.host.saves(step, movable=movable) as saved:
            payload = step.encoder.payload(units, states=self._given(pieces))
        if saved is not None:
            step.saved[pieces[0]] = list(saved.values())
        if step.encoder.trains:
            step.own[pieces] = get_gradient_edge(payload)
        payload = payload.detach()
        if not pieces and step.encoder.trains:
            step.own_gradients[None] = torch.zeros_like(payload)  # [0, width]
        parts: Sequence[Tensor] = [payload] if pieces else []
        if len(pieces) > 1:
            parts = payload.split(list(map(step.encoder.tokens, units)))
            if step.streamed is not None:  # a view of one piece would keep the memory of all
                parts = [each.clone() for each in parts]
        step.payloads |= zip(pieces, parts, strict=True)

    def _backward(self, pieces: tuple[int, ...], *, more: bool) -> None:
        step = self._now
        first, *others = map(step.own_gradients.pop, pieces or (None,))
        came = torch.cat([first, *others]) if others else first
        if step.carrier is not None:
            came = step.carrier.shared(pieces, came)
        step.encoder.backward(step.own.pop(pieces), came, more=more)

    def _given(self, pieces: tuple[int, ...]) -> Tensor | None:
        """What the stage before has made of a piece; held on to where it gets a gradient."""
        step = self._now
        if not pieces or pieces[0] not in step.states:
            return None
        (piece,) = pieces
        return step.states[piece] if step.encoder.trains_before else step.states.pop(piece)

    def _features_to_decoder(self, microbatch: int) -> None:
        """They are in the order of the text, as pieces are, and rows within one."""
        step = self._now
        found = [step.features.pop(each) for each in step.pieces_of(microbatch)]
        if step.carrier is not None:
            found = [step.carrier.dealt(microbatch, found)]
        (step.taken[microbatch],) = found

    def _gradient_of_decoder(self, microbatch: int) -> None:
        step, pieces = self._now, self._now.pieces_of(microbatch)
        assert step.arrived is not None
        came, step.arrived = step.arrived, None
        parts = [came]
        if step.carrier is not None:
            parts = step.carrier.collected(microbatch, pieces, came)
        step.gradients |= zip(pieces, parts, strict=True)

    def _gather(self, pieces: range, *, to_host: bool) -> None:
        step = self._now
        for some in step.spec.lots(pieces):
            own = [piece for piece in some if piece in step.payloads]
            arrived = self._all_to_all.gather_variable_shape_embeddings(
                {piece - some.start: step.payloads.pop(piece) for piece in own},
                step.spec.part(some),
            )
            here = [some.start + piece for piece in sorted(arrived)]
            for piece in here:
                rows = arrived.pop(piece - some.start)
                step.features[piece] = rows if to_host else own_storage(rows)
                del rows
            for to in (To.LEAVE, To.FREE) if to_host and here else ():
                self.host.move(to, Kept.FEATURES, here, step)

    def _scatter(self, pieces: range) -> None:
        step, exchange = self._now, self._all_to_all
        if exchange.consumes:
            missing = [piece for piece in pieces if piece not in step.gradients]
            assert not missing, f"no gradient came for pieces {missing}"
        found = exchange.scatter_variable_shape_embeddings(
            {
                piece - pieces.start: step.gradients.pop(piece)
                for piece in pieces
                if piece in step.gradients
            },
            step.spec.part(pieces),
        )
        step.own_gradients |= {pieces.start + piece: each for piece, each in found.items()}

    @property
    def _all_to_all(self) -> AllToAll:
        assert self._exchange is not None, "the encoder lies with the decoder"
        return self._exchange

    @property
    def _wire(self) -> Wire:
        carrier = self._now.carrier
        assert carrier is not None, "the step exchanges"
        return carrier.wire
