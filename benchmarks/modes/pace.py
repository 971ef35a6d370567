"""Work that is a sleep: it takes its time on any number of ranks, however few cores there are."""

import time
from typing import Any

import torch
from torch import Tensor

from loongplug.observe.recorder import Recorder
from loongplug.partition.clock import StageTime


class Pace:
    """Sleeps of one rank, which are reported as the work that they stand for.

    A machine wakes a process a little late. By what a sleep was too long the next one is shorter,
    so that a rank's work of a step is as long as was asked for.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._sleeps = False
        self._late = 0.0  # seconds that the last sleep was too long
        self.work: list[float] = []  # milliseconds asked for, by step

    def next_step(self, *, sleeps: bool) -> None:
        """A step begins; without ``sleeps`` all work takes no time."""
        self._sleeps = sleeps
        self._late = 0.0
        self.work.append(0.0)

    def sleep(self, milliseconds: float, *, encoder: bool, backward: bool, **details: Any) -> None:
        """Be at work for so long."""
        if not self._sleeps:
            return
        until = time.perf_counter() + milliseconds / 1e3 - self._late
        self.work[-1] += milliseconds
        if encoder:
            span = self._recorder.span(
                "encoder_backward" if backward else "encoder_forward", "encoder", **details
            )
        else:
            span = self._recorder.span("backward" if backward else "forward", "stage", **details)
        with span:
            time.sleep(max(0.0, until - time.perf_counter()))
            self._late = time.perf_counter() - until


def slept(
    rows: Tensor,
    pace: Pace,
    takes: StageTime,
    *,
    share: float = 1.0,
    encoder: bool = False,
    **details: Any,
) -> Tensor:
    """``rows``, after a sleep of a forward; their gradient comes after one of a backward.

    Both are a ``share`` of what ``takes`` says, in milliseconds.
    """
    found: Tensor = _Slept.apply(rows, pace, takes, share, {"encoder": encoder, **details})
    return found


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        pace: Pace,
        takes: StageTime,
        share: float,
        details: dict[str, Any],
    ) -> Tensor:
        ctx.back = pace, takes.backward * share, details
        pace.sleep(takes.forward * share, backward=False, **details)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        pace, milliseconds, details = ctx.back
        pace.sleep(milliseconds, backward=True, **details)
        return gradient, None, None, None, None
