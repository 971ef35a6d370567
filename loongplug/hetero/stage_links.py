"""Between the pipeline stages of an encoder on ranks of its own: states, and their gradients."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.sends import Coming, Sends, receive
from loongplug.observe.recorder import NOTHING, Recorder


@dataclass(frozen=True, kw_only=True)
class StageLink:
    """The rank of a neighbouring stage that this one exchanges with.

    It has this rank's tensor and data parallel coordinates. ``there`` is the process group of
    states, from the earlier stage to the later one, ``back`` that of their gradients: with NCCL,
    what goes there and what comes back would wait for one another in one queue. ``width`` is that
    of a payload.
    """

    peer: int
    there: dist.ProcessGroup
    back: dist.ProcessGroup
    width: int


@dataclass(frozen=True, kw_only=True)
class StageUnit:
    """A unit of a step: so many ``rows`` of states, of which microbatch of the step."""

    rows: int
    microbatch: int


class StageLinks:
    """One rank's links to the stages before and behind its own.

    Nobody waits for a send before the step's end, as long as what is under way in one direction is
    of no more than ``in_flight`` microbatches. Receives are posted ahead: of states ``window``
    units early, of the gradient that is taken next. Both sides know the number of rows from the
    text. Every row goes over once each way; a unit without rows is left out on both sides.
    """

    def __init__(
        self,
        *,
        before: StageLink | None,
        behind: StageLink | None,
        window: int,
        in_flight: int,
        device: torch.device,
        recorder: Recorder = NOTHING,
    ) -> None:
        """``before`` is None on the first stage, ``behind`` on the last."""
        self._before = before
        self._behind = behind
        self._window = window
        self._device = device
        self._recorder = recorder
        self._units: tuple[StageUnit, ...] = ()  # of the step
        self._dtype = torch.float32
        self._comes_back = False
        # Apart: gradients are of earlier microbatches, and a wait for states would come too soon.
        states, gradients = (f"sends of {what} between stages" for what in ("states", "gradients"))
        self._states_sent = Sends(most=in_flight, recorder=recorder, name=states)
        self._gradients_sent = Sends(most=in_flight, recorder=recorder, name=gradients)
        self._states: dict[int, Coming | None] = {}  # by unit; None where there are no rows
        self._gradients: dict[int, Coming | None] = {}
        self._owed: deque[int] = deque()  # units whose gradients are to come

    def begin(self, units: Sequence[StageUnit], *, dtype: torch.dtype, comes_back: bool) -> None:
        """A step of these units begins, whose states are of ``dtype``.

        ``comes_back``: gradients of what is handed on do.
        """
        assert not self._states, "the last step has not ended"
        self._units, self._dtype, self._comes_back = tuple(units), dtype, comes_back
        for unit in range(min(self._window, len(units))):
            self._post(unit)

    def take(self, unit: int) -> Tensor:
        """What the stage before has made of a unit, [rows, width]. Each unit once, in order."""
        self._post(unit + self._window)
        return self._arrived(unit, self._states.pop(unit), self._before, what="states")

    def hand_on(self, unit: int, payload: Tensor) -> None:
        """``payload`` [rows, width] of a unit, to the next stage."""
        link, rows = self._behind, self._units[unit].rows
        assert link is not None
        assert payload.shape == (rows, link.width), (unit, payload.shape, rows, link)
        assert payload.dtype == self._dtype, f"{payload.dtype} where {self._dtype} is received"
        if rows:
            self._send(unit, payload.detach(), link, back=False)
        if self._comes_back:
            self._owed.append(unit)
            if not self._gradients:
                self._post_gradient(link)

    def take_back(self, unit: int) -> Tensor:
        """The gradient of what was handed on of a unit, [rows, width]."""
        assert self._behind is not None
        found = self._arrived(unit, self._gradients.pop(unit), self._behind, what="gradients")
        self._post_gradient(self._behind)
        return found

    def give_back(self, unit: int, gradient: Tensor | None) -> None:
        """``gradient`` [rows, width] of what was taken of a unit; None where that has no rows."""
        link = self._before
        assert link is not None
        if self._units[unit].rows:
            assert gradient is not None, f"unit {unit} has no gradient"
            self._send(unit, gradient, link, back=True)

    def drain(self) -> None:
        """At the step's end: wait for what is still being sent."""
        self._states_sent.drain()
        self._gradients_sent.drain()
        assert not self._states, f"nobody took units {list(self._states)}"
        assert not self._gradients, f"nobody took gradients of units {list(self._gradients)}"

    def _post(self, unit: int) -> None:
        if self._before is not None and unit < len(self._units):
            self._states[unit] = self._receive(unit, self._before, group=self._before.there)

    def _post_gradient(self, link: StageLink) -> None:
        """Receive that of the next unit, where there is one."""
        if self._owed:
            unit = self._owed.popleft()
            self._gradients[unit] = self._receive(unit, link, group=link.back)

    def _receive(self, unit: int, link: StageLink, *, group: dist.ProcessGroup) -> Coming | None:
        count = self._units[unit].rows
        if not count:
            return None
        rows = torch.empty(count, link.width, dtype=self._dtype, device=self._device)
        return receive(rows, source=link.peer, group=group)

    def _arrived(
        self, unit: int, coming: Coming | None, link: StageLink | None, *, what: str
    ) -> Tensor:
        assert link is not None, "there is a stage on that side"
        if coming is None:
            return torch.empty(0, link.width, dtype=self._dtype, device=self._device)
        return coming.arrived(self._recorder, what, microbatch=self._units[unit].microbatch)

    def _send(self, unit: int, rows: Tensor, link: StageLink, *, back: bool) -> None:
        sends, what = self._states_sent, "states"
        if back:
            sends, what = self._gradients_sent, "gradients"
        group, microbatch = link.back if back else link.there, self._units[unit].microbatch
        sends.send(rows, what, target=link.peer, group=group, microbatch=microbatch)
