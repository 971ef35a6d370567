"""What goes from one pipeline stage to another: process groups, and messages under way.

There is a group for each direction: activations, gradients, and, with virtual stages, the same from
the last stage around to the first one. So in a group a rank's messages to another are of one kind,
in the order of its passes, which is the order in which the other one receives them. In one queue
for both directions, a receive that is posted early could lie before the send that the other rank
waits for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.communicators import pipeline_pairs
from loongplug.observe.recorder import Recorder, Span
from loongplug.parallel.connections import connected_group

_DIMENSIONS = 3  # of what stages send: [sequence, batch, hidden]


# By what goes there (:func:`~.communicators.pipeline_pairs`); None on ranks of no pipeline.
PipelineGroups = Mapping[str, dist.ProcessGroup | None]


def create_pipeline_groups(
    pipelines: Sequence[Sequence[int]], *, virtual: bool, **options: Any
) -> PipelineGroups:
    """The groups of this rank's pipeline, connected.

    ``pipelines`` are all of the decoder's, each by the ranks of its stages; ``virtual``: it has
    virtual stages. ``options`` are :func:`connected_group`'s. Collective over the world.
    """
    pairs = [pipeline_pairs(ranks, virtual=virtual) for ranks in pipelines]
    return {
        name: connected_group(
            name, pipelines, chain(*(each[name] for each in pairs)), options_of="pp", **options
        )
        for name in pairs[0]
    }


@dataclass(frozen=True, kw_only=True)
class Channel:
    """To or from a neighbour, in one direction."""

    name: str  # as a trace has it, and so are ``size`` and ``side``, names of its details
    size: str
    side: str
    peer: int
    group: dist.ProcessGroup

    def span(self, recorder: Recorder, *, tensor: Tensor | None = None) -> Span:
        """Of a message that moves on this way; its bytes are noted, or are those of ``tensor``."""
        known = {} if tensor is None else {self.size: tensor.nbytes}
        return recorder.span("p2p", self.name, **known, **{self.side: self.peer})

    def send(self, tensor: Tensor) -> dist.Work | None:
        return dist.isend(tensor, dst=self.peer, group=self.group)

    def receive(self, tensor: Tensor) -> dist.Work:
        work = dist.irecv(tensor, src=self.peer, group=self.group)
        assert work is not None, "this rank is in the group"
        return work


class StageInput:
    """An input under way; ``tensor`` is filled when it has been waited for.

    Where shapes are announced, that of the input comes first, and its memory is allocated then. A
    receive behind one whose shape is not known yet is posted later: its shape comes behind what
    that one receives.
    """

    def __init__(
        self,
        way: Channel,
        shape: Sequence[int] | None,
        *,
        dtype: torch.dtype,
        before: "StageInput | None",
        recorder: Recorder,
    ) -> None:
        """``shape`` is None where it is announced, ``before`` the receive before it where so."""
        self._way, self._recorder = way, recorder
        self._device = torch.cuda.current_device()
        self.tensor = torch.empty(
            (0,) if shape is None else tuple(shape),
            dtype=dtype,
            device=self._device,
            requires_grad=True,
        )
        self._announced = shape is None
        self._done = False
        self._before = before
        self._behind: StageInput | None = None  # posted when this one's shape is here
        if before is None or before._done:
            self._post()
        else:
            before._behind = self

    def wait(self) -> None:
        """Until it is there, as upstream's handles; a second time does nothing."""
        if self._done:
            return
        if self._before is not None:  # Megatron's last backwards do not wait in their order
            self._before.wait()
            self._before = None
        with self._way.span(self._recorder) as span:
            self._work.wait()
            if self._announced:
                self._receive_announced()
            span.note(**{self._way.size: self.tensor.nbytes})
        self._done = True

    def _post(self) -> None:
        self._shape = torch.empty(_DIMENSIONS, dtype=torch.int64, device=self._device)
        # Not the leaf itself, of which nothing is to know before it is used.
        self._work = self._way.receive(self._shape if self._announced else self.tensor.detach())

    def _receive_announced(self) -> None:
        found = torch.empty(
            self._shape.tolist(), dtype=self.tensor.dtype, device=self.tensor.device
        )
        work = self._way.receive(found)
        if self._behind is not None:
            self._behind._post()
        work.wait()
        self.tensor.data = found


class Sent:
    """Something on its way, for a schedule that waits before it lets go of it: no need to."""

    def wait(self) -> None:
        """As upstream's handles."""
