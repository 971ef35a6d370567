"""What a rank of a real run holds, counted from its live tensors, for one training step."""

import weakref
from dataclasses import dataclass, field
from typing import Any

from megatron.core.pipeline_parallel import schedules
from torch.utils._python_dispatch import _disable_current_modes

from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import VisionInput
from loongplug.estimate.encoder_side import PIXELS
from loongplug.estimate.estimate import GRADIENTS, OPTIMIZER, WEIGHTS
from loongplug.estimate.ledger import FEATURE_GRADIENTS, FEATURES
from loongplug.estimate.tape import Tape
from loongplug.estimate.trace import DECODER, ENCODER
from loongplug.hetero.exchange import Exchange
from loongplug.hetero.group_ahead import GroupAhead
from loongplug.hetero.store import KeptOnDevice
from loongplug.hetero.three_phases import ThreePhases
from loongplug.hetero.timing import Arrived
from loongplug.models.features import VisionFeatures
from loongplug.models.multimodal import MultimodalModel
from loongplug.training.run import run


@dataclass
class Measured:
    """Bytes: what stays between steps, the most of each kind within one, and the most of all."""

    state: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    total: int = 0


class _Watch:
    """Puts a tape over everything from the first step on, and looks at it in the second."""

    def __init__(self, *, apart: bool) -> None:
        self.tape = Tape(region=DECODER)
        self.apart = apart
        self.found = Measured()
        self.steps = 0
        self.arrived: list[weakref.ref[Arrived]] = []
        self.stored: list[weakref.ref[KeptOnDevice]] = []

    def built(self, chunks: Any, optimizer: Any, *, mapping: Any) -> None:
        self.chunks, self.optimizer = chunks, optimizer
        self._name_regions()
        self.tape.__enter__()

    def loss(self, microbatch: Any, report: Any) -> None:
        pass

    def stepped(self, _: Any) -> None:
        self.steps += 1
        if self.steps == 1:
            self.found.most.clear()
            self.tape.restart()
            return
        state = self._state()
        self.found.state = {name: sum(each.values()) for name, each in state.items()}
        inside = sum(
            nbytes
            for each in state.values()
            for key, nbytes in each.items()
            if key in self.tape._known
        )
        self.found.total = sum(self.found.state.values()) + self.tape.most - inside
        self.tape.__exit__(None, None, None)

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
            for group in each.optimizer.param_groups:
                for parameter in group["params"]:
                    put(OPTIMIZER, parameter)
            for moments in each.optimizer.state.values():
                for moment in moments.values():
                    put(OPTIMIZER, moment)
        return state

    def _name_regions(self) -> None:
        tape = self.tape
        encode, packed = MultimodalModel.encode, VisionFeatures.packed
        arrived = Arrived.__init__

        def encode_counted(model: Any, vision: Any) -> Any:
            with tape.region(ENCODER):
                if vision is not None and not self.apart:  # else the loader's cache holds them
                    vision = VisionInput(pixels=vision.pixels.clone(), grid_thw=vision.grid_thw)
                return encode(model, vision)

        def packed_counted(features: Any) -> Any:
            with tape.region(FEATURES):
                return packed(features)

        def exchange_counted(exchange: Any) -> Any:
            def exchanged(*args: Any) -> Any:
                with tape.region(FEATURES):
                    return exchange(*args)

            return exchanged

        def arrived_noted(made: Any, *args: Any, **kwargs: Any) -> None:
            arrived(made, *args, **kwargs)
            self.arrived.append(weakref.ref(made))

        def stored_noted(made: Any, *args: Any, **kwargs: Any) -> None:
            stored(made, *args, **kwargs)
            self.stored.append(weakref.ref(made))

        def begin_counted(self: Any, chunk: Any, microbatches: Any, *, training: bool) -> None:
            with tape.region(PIXELS):
                for each in microbatches:
                    if each.vision is not None:
                        tape.see(each.vision.pixels)
            begins[type(self)](self, chunk, microbatches, training=training)

        def next_uncounted(self: Any) -> Any:
            with _disable_current_modes():  # what it makes is in the host's memory
                return load(self)

        begins = {timing: timing.begin for timing in (ThreePhases, GroupAhead)}
        for timing in begins:
            timing.begin = begin_counted
        load, MicrobatchLoader.__next__ = MicrobatchLoader.__next__, next_uncounted
        MultimodalModel.encode = encode_counted
        for name in ("gather_variable_shape_embeddings", "scatter_variable_shape_embeddings"):
            setattr(Exchange, name, exchange_counted(getattr(Exchange, name)))
        Arrived.__init__ = arrived_noted
        stored, KeptOnDevice.__init__ = KeptOnDevice.__init__, stored_noted
        if self.apart:
            VisionFeatures.packed = packed_counted
        for name in ("forward_step", "backward_step"):
            setattr(schedules, name, self._sampled(getattr(schedules, name)))

    def _sampled(self, function: Any) -> Any:
        def sampled(*args: Any, **kwargs: Any) -> Any:
            self._sample()
            return function(*args, **kwargs)

        return sampled

    def _sample(self) -> None:
        state = {key for each in self._state().values() for key in each}
        live: dict[str, int] = {}
        for key, (_, region, nbytes) in self.tape._known.items():
            if key not in state:
                live[region] = live.get(region, 0) + nbytes
        gradients = [
            leaf.grad
            for arrived in self.arrived
            if (each := arrived()) is not None
            for leaf in each.leaves.values()
            if leaf.grad is not None
        ]
        gradients += [
            gradient
            for stored in self.stored
            if (kept := stored()) is not None
            for gradient in kept._gradients.values()
        ]
        live[FEATURE_GRADIENTS] = sum(each.untyped_storage().nbytes() for each in gradients)
        live[DECODER] = live.get(DECODER, 0) - live[FEATURE_GRADIENTS]
        for name, nbytes in live.items():
            self.found.most[name] = max(self.found.most.get(name, 0), nbytes)


def measure(rank: int, *, flags: list[str], apart: bool) -> Measured:
    """Two steps of the run; what the second held."""
    watch = _Watch(apart=apart)
    run(flags, watch=watch, on_report=watch.stepped)
    return watch.found
