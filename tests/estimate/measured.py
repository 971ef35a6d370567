"""What a rank of a real run holds, counted from its live tensors, for one training step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from free_passes import free_passes
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import combined_1f1b, schedules
from micro.memory_counter import all_to_alls_apart
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import MediaInput, MediaToCome
from loongplug.estimate.live_bytes import (
    DECODER,
    ENCODER,
    FEATURE_GRADIENTS,
    FEATURES,
    GRADIENTS,
    INPUT,
    OPTIMIZER,
    STATE_GRADIENTS,
    STATES,
    WEIGHTS,
    Tape,
)
from loongplug.hetero.bubbles import BubbleCommunicator
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.exchange import AllToAll
from loongplug.hetero.executed_step import ExecutedStep
from loongplug.hetero.executor import Executor, unwrapped
from loongplug.hetero.operations import Cargo, Kept
from loongplug.hetero.piece_carrier import Carrier, Dealer
from loongplug.hetero.wire import Wire
from loongplug.models.decoder import TextDecoder
from loongplug.models.features import Features
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform.platforms import CpuPlatform
from loongplug.platform.prefetch import Copies, PrefetchQueue
from loongplug.schedule.tensor_offload import LayerTensors, TensorOffload
from loongplug.training.delivery import LoadedShare
from loongplug.training.run import run

_REGIONS = {
    Kept.FEATURES: FEATURES,
    Kept.GRADIENTS: FEATURE_GRADIENTS,
    Kept.ACTIVATIONS: ENCODER,
}
_KINDS = {
    Cargo.FEATURES: FEATURES,
    Cargo.GRADIENTS: FEATURE_GRADIENTS,
    Cargo.STATES: STATES,
    Cargo.STATE_GRADIENTS: STATE_GRADIENTS,
}
AWAY = "encoder's state on the host"  # counts below zero


@dataclass
class Measured:
    """Bytes: what stays between steps, the most of each kind within one, and the most of all.

    ``step`` is the most in the optimizer's step. ``host`` is the most of what has left the device,
    which counts for none of these.
    """

    state: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    total: int = 0
    step: int = 0
    host: int = 0


class _Watch:
    """Puts a tape over everything from the first step on, and looks at it in the second."""

    def __init__(self, *, apart: bool) -> None:
        self.tape = Tape(region=DECODER)
        self.host = Tape(region="host")
        self.apart = apart
        self.found = Measured()
        self.steps = 0
        self.most_before_step = 0  # of the optimizer
        self.most_in_step = 0
        self.entered = ExitStack()
        self.executors: list[Executor] = []  # one for each encoder

    def built(self, chunks: Any, optimizer: Any, *, mapping: Any) -> None:
        self.chunks, self.optimizer = chunks, optimizer
        self.decodes = hasattr(unwrapped(chunks[0]), "text_decoder")
        self._name_regions()
        self._follow_wires()
        self.entered.enter_context(self.tape.resizes())
        self.entered.enter_context(all_to_alls_apart())
        self.entered.enter_context(self.tape)

    def loss(self, microbatch: Any, report: Any) -> None:
        pass

    def stepped(self, _: Any) -> None:
        self.steps += 1
        if self.steps == 1:
            self.found.most.clear()
            self.tape.restart()
            self.host.restart()
            return
        state = self._state()
        self.found.state = {name: sum(each.values()) for name, each in state.items()}
        inside = sum(
            nbytes
            for each in state.values()
            for key, nbytes in each.items()
            if key in self.tape._known
        )
        beside = sum(self.found.state.values()) - inside
        most = max(self.most_before_step, self.most_in_step, self.tape.most)
        self.found.total, self.found.step = beside + most, beside + self.most_in_step
        self.found.host = self.host.most
        self.entered.close()

    def _state(self) -> dict[str, dict[int, int]]:
        """Storages and their bytes."""
        state: dict[str, dict[int, int]] = {WEIGHTS: {}, GRADIENTS: {}, OPTIMIZER: {}}

        def put(name: str, tensor: Any) -> None:
            storage = tensor.untyped_storage()
            if all(storage._cdata not in each for each in state.values()):
                state[name][storage._cdata] = storage.nbytes()

        for chunk in self.chunks:
            for each in (*chunk.module.parameters(), *chunk.module.buffers()):
                put(WEIGHTS, each)
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                put(GRADIENTS, buffer.grad_data)
        for each in self.optimizer.chained_optimizers:
            if each.optimizer is None:  # nothing trains
                continue
            for group in each.optimizer.param_groups:
                for parameter in group["params"]:
                    put(OPTIMIZER, parameter)
            for moments in each.optimizer.state.values():
                for moment in moments.values():
                    put(OPTIMIZER, moment)
        return state

    def _name_regions(self) -> None:
        region, taken = self.tape.region, MediaToCome.taken

        def inside(name: str) -> Callable[..., AbstractContextManager[Any]]:
            return lambda *_, **__: region(name)

        def taken_counted(media: Any) -> MediaInput:
            # Those of a forward of the decoder's are the encoder's own.
            with region(INPUT if self.tape._region == ENCODER else ENCODER):
                found = taken(media)
                if found.loaded.untyped_storage()._cdata not in self.tape._known:  # as on the host
                    found = replace(found, loaded=found.loaded.clone())
            self._note(INPUT)
            return found

        def begins(executor: Executor, *_: Any, **__: Any) -> None:
            if executor not in self.executors:
                self.executors.append(executor)

        around(Executor, "begin", before=begins)
        for owner, name in ((MicrobatchLoader, "__next__"), (LoadedShare, "bad")):
            # Made in the host's memory.
            around(owner, name, inside=lambda *_, **__: _disable_current_modes())
        MediaToCome.taken = taken_counted
        around(MultimodalModel, "encode", inside=inside(ENCODER))
        around(MultimodalModel, "_encoded", inside=inside(ENCODER))  # of any stage
        around(EncoderOfStep, "_given", inside=inside(ENCODER))  # units in one pass
        for name in ("gather_variable_shape_embeddings", "scatter_variable_shape_embeddings"):
            around(AllToAll, name, inside=inside(FEATURES))
        around(ExecutedStep, "_gather", inside=inside(FEATURES))
        around(ExecutedStep, "_features_to_decoder", inside=inside(FEATURES))
        around(Dealer, "features", inside=inside(FEATURES))
        around(Dealer, "gradients", inside=inside(FEATURE_GRADIENTS))
        around(Carrier, "shared", inside=inside(FEATURE_GRADIENTS))
        if self.apart:
            around(Features, "packed", inside=inside(FEATURES))
        for name in ("forward_step", "backward_step"):
            around(schedules, name, before=self._sample)
        around(combined_1f1b, "combined_forward_backward_step", before=self._sample)
        around(ChainedOptimizer, "step", before=self._step_begins, behind=self._step_ends)
        self._follow_offload()

    def _follow_wires(self) -> None:
        """What comes to a rank, or is kept there; one that encodes alone has no passes.

        Of pieces, what goes is gone at once, as it is where it has been received, and so is what
        goes to other stages: a copy that does not count is sent. Nobody can wait for a send there.
        """
        tape, send, bubbles = self.tape, Wire._send, BubbleCommunicator._send
        payload = EncoderOfStep.payload

        def copied(tensor: Tensor) -> Tensor:
            with _disable_current_modes():
                return tensor.clone()

        def gone(wire: Any, what: Cargo, rows: Tensor, *args: Any, **options: Any) -> None:
            if what is Cargo.STATE_GRADIENTS:
                tape.belongs(rows, STATE_GRADIENTS)
            if _of_pieces(wire):
                rows = copied(rows)
            elif any(each.back for each in wire.ways):
                # Only who waits for a send hears from gloo that it is done; NCCL says so at once.
                wire.sends[what].drain()
            send(wire, what, rows, *args, **options)

        def features_or_not(there: bool) -> AbstractContextManager[Any]:
            return tape.region(FEATURES) if there else nullcontext()

        def of_kind(wire: Wire, what: Cargo, *_: Any) -> AbstractContextManager[Any]:
            return tape.region(_KINDS[what])

        def noted(there: bool) -> None:
            if there:
                self._note(FEATURES)

        def made(encoder: EncoderOfStep, *args: Any, **kwargs: Any) -> Tensor:
            found = payload(encoder, *args, **kwargs)
            if len(encoder._model.modules_of(encoder._entry)) == 1:  # the projector is behind
                tape.belongs(found, STATES)
            if not self.decodes:
                self._sample()
            return found

        Wire._send, EncoderOfStep.payload = gone, made
        BubbleCommunicator._send = lambda self, name, tensor: bubbles(self, name, copied(tensor))
        around(Wire, "send", inside=lambda _, what, *__: features_or_not(what is Cargo.FEATURES))
        around(Wire, "_post", inside=of_kind)
        around(Wire, "receive", inside=of_kind, behind=lambda wire, *_: noted(_of_pieces(wire)))
        around(
            ExecutedStep,
            "_encode",
            inside=lambda step, *_, **__: features_or_not(step.streamed is not None),
            behind=lambda step, *_, **__: noted(step.streamed is not None),
        )
        if not self.decodes:
            around(EncoderOfStep, "backward", before=self._sample)

    def _step_begins(self, _: Any) -> None:
        self.most_before_step = self.tape.most
        self.tape.restart()

    def _step_ends(self, _: Any) -> None:
        self.most_in_step = self.tape.most

    def _follow_offload(self) -> None:
        """What moves is named for what it is; the host's memory is none of the device's."""
        tape = self.tape

        def moved(nbytes: int) -> None:
            tape.add(AWAY, nbytes)

        def host_like(copies: Any, tensor: Tensor) -> Tensor:
            with _disable_current_modes():
                made = on_host(copies, tensor)
            self.host.see(made)
            return made

        def layer_made(_: Any, offload: TensorOffload, *__: Any, **___: Any) -> None:
            offload.release = tape.given_back

        def coming(names: Any) -> str | None:
            return next((_REGIONS.get(each[0]) for each in names if type(each) is tuple), None)

        def sent_for(_: Any, *names: Any) -> AbstractContextManager[Any]:
            region = coming(names)
            return nullcontext() if region is None else tape.region(region)

        def noted(_: Any, *names: Any) -> None:
            if (region := coming(names)) is not None:
                self._note(region)

        on_host, Copies.host_like = Copies.host_like, host_like
        around(PrefetchQueue, "send_for", inside=sent_for, behind=noted)
        around(LayerTensors, "__init__", before=layer_made)
        around(CpuPlatform, "release", before=lambda _, storage: moved(-storage.nbytes()))
        around(CpuPlatform, "restore", before=lambda _, __, nbytes: moved(nbytes))
        # The fullest moments of these are not at a pass of the decoder's.
        around(AllToAll, "gather_variable_shape_embeddings", before=lambda *_: self._note(FEATURES))
        around(Executor, "taken", before=lambda *_: self._note(FEATURES))
        around(EncoderOfStep, "payload", behind=lambda *_, **__: self._note(ENCODER))

    def _note(self, region: str) -> None:
        nbytes = self.tape.live.get(region, 0)
        self.found.most[region] = max(self.found.most.get(region, 0), nbytes)

    def _sample(self, *_: Any, **__: Any) -> None:
        state = {key for each in self._state().values() for key in each}
        live: dict[str, int] = {}
        # As a list: a thread of gloo's may free what it has moved meanwhile.
        for key, (_, region, nbytes) in list(self.tape._known.items()):
            if key not in state:
                live[region] = live.get(region, 0) + nbytes
        if self.decodes:
            gradients = [each for executor in self.executors for each in _gradients_of(executor)]
            storages = {each._cdata: each for each in map(Tensor.untyped_storage, gradients)}
            made = sum(each.nbytes() for each in storages.values())  # in the decoder's backward
            came = live.get(FEATURE_GRADIENTS, 0) if any(map(_streams, self.executors)) else 0
            live[FEATURE_GRADIENTS] = came + made
            live[DECODER] = live.get(DECODER, 0) - made
        for name, nbytes in live.items():
            self.found.most[name] = max(self.found.most.get(name, 0), nbytes)


def _gradients_of(executor: Executor) -> list[Tensor]:
    """Of features, as far as they are on the device: also those that leave."""
    step, lots = executor._step, executor.host.queue._lots
    leaving = [
        each.device
        for name, lot in lots.items()
        if isinstance(name, tuple) and name[0] is Kept.GRADIENTS
        for each in lot.items
        if each.device is not None
    ]
    if _streams(executor):
        kept = executor.carrier.wire.ways[Cargo.GRADIENTS].kept
        leaving += [each for each in kept.values() if len(each)]
    if executor.carrier is not None and not _of_pieces(executor.carrier.wire):
        leaving += [each.tensor for each in executor.carrier.wire.sends[Cargo.GRADIENTS]._under_way]
    return [*([] if step is None else step.gradients.values()), *leaving]


def _streams(executor: Executor) -> bool:
    return executor._step is not None and executor._step.pieces is not None


def _of_pieces(wire: Any) -> bool:
    return all(each._most == inf for each in wire.sends.values())


def around(
    owner: Any,
    name: str,
    *,
    before: Callable[..., None] = lambda *_, **__: None,
    inside: Callable[..., AbstractContextManager[Any]] = lambda *_, **__: nullcontext(),
    behind: Callable[..., None] = lambda *_, **__: None,
) -> None:
    """Put these around a function; all are told what it is called with."""
    function = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        with inside(*args, **kwargs):
            result = function(*args, **kwargs)
        behind(*args, **kwargs)
        return result

    setattr(owner, name, called)


def measure(rank: int, *, flags: list[str], apart: bool, freely: bool) -> Measured:
    """Two steps of the run; what the second held.

    ``freely``: what streams does so in many passes.
    """
    if freely:
        free_passes(rank)
    watch = _Watch(apart=apart)
    # An estimate is of full rows: it takes no token for padding, which experts are not sent.
    router_mask = TextDecoder.router_mask
    TextDecoder.router_mask = lambda *_, **__: None
    try:
        run(flags, watch=watch, on_report=watch.stepped)
    finally:
        TextDecoder.router_mask = router_mask
    return watch.found
