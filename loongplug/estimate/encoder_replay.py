"""The run's own executor of an encoder's plan, on tensors without memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from loongplug.data.microbatch import Microbatch
from loongplug.estimate.live_bytes import (
    ENCODER,
    FEATURE_GRADIENTS,
    FEATURES,
    STATE_GRADIENTS,
    STATES,
    TRANSIENT,
    Tape,
)
from loongplug.estimate.tracing import Away
from loongplug.hetero import engine
from loongplug.hetero.encoder_state import EncoderState
from loongplug.hetero.engine import EncoderEngine
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Backward,
    Cargo,
    Encode,
    Event,
    Kept,
    Operation,
    When,
)
from loongplug.hetero.wire import Sends
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform.prefetch import Movable

_META = torch.device("meta")
_REGIONS: dict[Cargo | Kept, str] = {
    Cargo.FEATURES: FEATURES,
    Cargo.GRADIENTS: FEATURE_GRADIENTS,
    Cargo.STATES: STATES,
    Cargo.STATE_GRADIENTS: STATE_GRADIENTS,
    Kept.FEATURES: FEATURES,
    Kept.GRADIENTS: FEATURE_GRADIENTS,
    Kept.ACTIVATIONS: ENCODER,
}
# Other operations are called by their names.
_SAID: dict[type, str] = {Encode: "encoder's forward", Backward: "encoder's backward"}


class EncoderReplay:
    """One rank's encoder side of a step: the plan's operations, event by event, on a tape.

    No operation is interpreted here: what the run's executor makes and frees is what counts. Only
    the encoder's passes (:class:`EncoderStandIn`), what lies between steps, and when sends are done
    have stand-ins.
    """

    def __init__(
        self,
        of_run: EncoderEngine,
        chunk: MultimodalModel,
        microbatches: list[Microbatch],
        *,
        trains: Sequence[bool],
        away: Mapping[str, int],
        tape: Tape,
    ) -> None:
        """``chunk`` makes payloads by a stand-in; ``microbatches`` have what this rank encodes.

        ``trains``: by stage, of an encoder on ranks of its own; ``away`` are the bytes that leave
        with an encoder's state, by region. Inside :func:`one_rank`.
        """
        self._tape = tape
        self._microbatches = microbatches  # until the step has ended
        part = SimpleNamespace(
            no_sync=nullcontext,
            ddp_config=SimpleNamespace(overlap_param_gather=False, overlap_grad_reduce=False),
        )
        # As far as an executor looks at what Megatron wraps around a chunk.
        parts = {of_run.found.entry.name: part}
        self._chunk = SimpleNamespace(module=chunk, parts=parts, outside_schedule=set())
        # By microbatch, in the decoder's graph, and how many features there are.
        self._taken: dict[int, tuple[GradientEdge, int]] = {}
        own = copy(of_run)  # each rank has an executor of its own, in the same place
        if own.mode.apart:
            own.hear(trains)
        executor = self._executor = own.executor()
        none = torch.empty(0, device=_META)
        state = [
            _StateBytes(device=none, where=_META, region=region, nbytes=nbytes, tape=tape)
            for region, nbytes in away.items()
        ]
        executor.host.state = cast(EncoderState, SimpleNamespace(movable=lambda: state))
        links = {} if executor.carrier is None else executor.carrier.links
        last = not any(source == dist.get_rank() for source, _ in links)
        first = not any(target == dist.get_rank() for _, target in links)
        self._made = FEATURES if last else STATES  # by a pass, forward and backward
        self._passes: dict[type, str] = {
            Encode: ENCODER,
            Backward: TRANSIENT if first else STATE_GRADIENTS,
        }
        self._operate, executor.operate = executor.operate, self._counted  # type: ignore[method-assign]
        self._sends: dict[Cargo, _Sends] = {}
        if executor.carrier is not None:
            wire = executor.carrier.wire
            post = wire._post

            def posted(what: Cargo) -> None:
                with tape.region(_REGIONS[what]):
                    post(what)

            wire._post = posted  # type: ignore[method-assign]
            self._sends = {what: _Sends(most=each._most) for what, each in wire.sends.items()}
            wire.sends = {**self._sends}

    def at(self, when: When) -> None:
        self._tape.doing = when.event.value
        if when == BEGIN:
            self._executor.begin(self._chunk, self._microbatches, training=True)
        elif when == END:
            self._microbatches.clear()
            self._executor.end()
        elif when.event is Event.GRADIENT and when.microbatch in self._taken:
            edge, rows = self._taken.pop(when.microbatch)
            spec = self._executor._now.spec
            with self._tape.region(FEATURE_GRADIENTS):  # held as long as the decoder's node works
                came = torch.empty(rows, spec.width, dtype=spec.dtype, device=_META)
            torch.autograd.backward(edge, came)
        else:
            self._executor.do(when)
        if when.event is Event.FORWARD and when.microbatch in self._executor._now.taken:
            # They are used up before the decoder's forward has all that it leaves.
            features = self._executor.taken(when.microbatch)
            if features.requires_grad:
                self._taken[when.microbatch] = get_gradient_edge(features), len(features)

    def _counted(self, operation: Operation) -> None:
        what = getattr(operation, "what", None)
        if isinstance(what, Cargo) and what.back:
            # Who takes what is sent here has got as far as to send something back.
            for sends in self._sends.values():
                sends.arrived()
        kind = type(operation)
        region = _REGIONS[what] if what in _REGIONS else self._passes.get(kind, TRANSIENT)
        self._tape.doing = _SAID.get(kind, f"{kind.__name__.lower()} of {region}")
        with self._tape.region(region):
            self._operate(operation)
        for made in self._executor._now.payloads.values() if kind is Encode else ():
            self._tape.belongs(made, self._made, of=ENCODER)
        self._tape.sample()


class _Sends(Sends):
    """Messages that count as held until they are waited for, or are known to have arrived.

    Where nobody waits for a send, what is sent counts as gone.
    """

    _given = _known = 0

    def arrived(self) -> None:
        """Take it that all messages given so far have arrived."""
        self._known = self._given

    def add(self, work: Any, tensor: Tensor, *, microbatch: int) -> None:
        """See :meth:`Sends.add`; on tensors without memory, ``work`` is nothing."""
        if self._most == inf:
            return
        self._given = number = self._given + 1

        def wait() -> None:
            self._known = max(self._known, number)

        message = SimpleNamespace(is_completed=lambda: number <= self._known, wait=wait)
        super().add(cast(dist.Work, message), tensor, microbatch=microbatch)


@dataclass(kw_only=True, eq=False)
class _StateBytes(Movable):
    """Bytes of an encoder's state, which no tensor stands for."""

    region: str
    nbytes: int
    tape: Tape

    def free(self) -> None:
        self.tape.take(self.region, self.nbytes)

    def allocate(self) -> Tensor:
        self.tape.add(self.region, self.nbytes)
        return super().allocate()


@contextmanager
def one_rank(rank: int, tape: Tape) -> Iterator[None]:
    """Inside, an engine takes this process for ``rank``, and its device for one without memory.

    The process groups are those of another rank with the same modules.
    """
    group_rank, away = dist.get_rank, Away(tape)
    with (
        patch.object(dist, "get_rank", lambda group=None: group_rank(group) if group else rank),
        patch.object(dist, "broadcast", lambda *_, **__: None),  # in a group that may be another's
        patch.object(engine, "current_platform", lambda: away),
        tape,
    ):
        yield
