"""Between the pipeline stages of an encoder on ranks of its own: states, and their gradients."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.parallel.layout import Layout


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
class _Moving:
    """A message under way, and what must not change until it is done, [rows, width]."""

    work: dist.Work
    rows: Tensor


class StageLinks:
    """One rank's links to the stages before and behind its own.

    Nobody waits for a send before the step's end, and receives are posted ahead: of states
    ``window`` units early, of a gradient with what it is of. Both sides know the number of rows
    from the text. Every row goes over once each way; a unit without rows is left out on both sides.
    """

    def __init__(
        self,
        *,
        before: StageLink | None,
        behind: StageLink | None,
        window: int,
        device: torch.device,
        recorder: Recorder = NOTHING,
    ) -> None:
        """``before`` is None on the first stage, ``behind`` on the last."""
        self._before = before
        self._behind = behind
        self._window = window
        self._device = device
        self._recorder = recorder
        self._rows: tuple[int, ...] = ()  # of each unit of the step
        self._dtype = torch.float32
        self._comes_back = False
        self._sending: deque[_Moving] = deque()
        self._states: dict[int, _Moving | None] = {}  # by unit; None where there are no rows
        self._gradients: dict[int, _Moving | None] = {}

    def begin(self, rows: Sequence[int], *, dtype: torch.dtype, comes_back: bool) -> None:
        """A step of units with so many ``rows`` begins, of ``dtype``.

        ``comes_back``: gradients of what is handed on do.
        """
        assert not self._states, "the last step has not ended"
        self._rows, self._dtype, self._comes_back = tuple(rows), dtype, comes_back
        for unit in range(min(self._window, len(rows))):
            self._post(unit)

    def take(self, unit: int) -> Tensor:
        """What the stage before has made of a unit, [rows, width]. Each unit once, in order."""
        self._post(unit + self._window)
        assert self._before is not None
        return self._arrived(self._states.pop(unit), width=self._before.width, what="states")

    def hand_on(self, unit: int, payload: Tensor) -> None:
        """``payload`` [rows, width] of a unit, to the next stage."""
        link, rows = self._behind, self._rows[unit]
        assert link is not None
        assert payload.shape == (rows, link.width), (unit, payload.shape, rows, link)
        if rows:
            self._send(payload.detach(), link.peer, group=link.there)
        if self._comes_back:
            self._gradients[unit] = self._receive(unit, link, group=link.back)

    def take_back(self, unit: int) -> Tensor:
        """The gradient of what was handed on of a unit, [rows, width]."""
        assert self._behind is not None
        return self._arrived(self._gradients.pop(unit), width=self._behind.width, what="gradients")

    def give_back(self, unit: int, gradient: Tensor | None) -> None:
        """``gradient`` [rows, width] of what was taken of a unit; None where that has no rows."""
        link = self._before
        assert link is not None
        if self._rows[unit]:
            assert gradient is not None, f"unit {unit} has no gradient"
            self._send(gradient, link.peer, group=link.back)

    def drain(self) -> None:
        """At the step's end: wait for what is still being sent."""
        with self._recorder.span("exchange", "sends between stages"):
            while self._sending:
                self._sending.popleft().work.wait()
        assert not self._states, f"nobody took units {list(self._states)}"
        assert not self._gradients, f"nobody took gradients of units {list(self._gradients)}"

    def _post(self, unit: int) -> None:
        if self._before is not None and unit < len(self._rows):
            self._states[unit] = self._receive(unit, self._before, group=self._before.there)

    def _receive(self, unit: int, link: StageLink, *, group: dist.ProcessGroup) -> _Moving | None:
        if not self._rows[unit]:
            return None
        rows = torch.empty(self._rows[unit], link.width, dtype=self._dtype, device=self._device)
        work = dist.irecv(rows, src=link.peer, group=group)
        assert work is not None, "this rank is in the group"
        return _Moving(work=work, rows=rows)

    def _arrived(self, moving: _Moving | None, *, width: int, what: str) -> Tensor:
        if moving is None:
            return torch.empty(0, width, dtype=self._dtype, device=self._device)
        with self._recorder.span("exchange", what, bytes=moving.rows.nbytes):
            moving.work.wait()
        return moving.rows

    def _send(self, rows: Tensor, peer: int, *, group: dist.ProcessGroup) -> None:
        while self._sending and self._sending[0].work.is_completed():
            self._sending.popleft().work.wait()
        rows = rows.contiguous()
        work = dist.isend(rows, dst=peer, group=group)
        assert work is not None, "this rank is in the group"
        self._sending.append(_Moving(work=work, rows=rows))


def boundaries(layout: Layout) -> list[list[int]]:
    """The ranks on both sides of each boundary between two stages, ascending."""
    pipelines = layout.groups("pp")
    return [
        sorted(rank for ranks in pipelines for rank in ranks[stage : stage + 2])
        for stage in range(layout.pp - 1)
    ]
