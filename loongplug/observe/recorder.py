"""What code reports events to: a recorder that drops them, and one that keeps them.

A recorder is handed down. Code that nobody handed one reports to ``NOTHING``.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

import torch

from loongplug.observe.trace_file import TraceEvent

_OnHost = Literal["data", "evaluation", "checkpoint"]  # whatever the device does meanwhile
_Computing = Literal["forward", "backward", "forward_backward", "gradients", "optimizer"]
_OfEncoders = Literal["encoder_forward", "encoder_backward"]
_Transfers = Literal["exchange", "p2p", "collective", "wait"]
Phase = Literal["step", _Computing, _OfEncoders, _Transfers, _OnHost, "switch"]  # docs/traces.md

_KEPT: Final = 4096  # finished events: written at the latest when there are so many


class Span:
    """Something that has begun, until :meth:`end` or its block's end. This one keeps nothing."""

    __slots__ = ()

    def note(self, **details: Any) -> None:
        """Add what is known only now."""

    def end(self) -> None:
        """The span is over; a second time does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end()


class Recorder:
    """Where events are reported. Details are numbers and short strings. This one drops them all."""

    _nothing: Final = Span()

    def span(self, phase: Phase, name: str, **details: Any) -> Span:
        """Something begins now. Local: no rank waits for another."""
        return self._nothing

    def mark(self, phase: Phase, name: str, **details: Any) -> None:
        """Something happened now."""
        self.span(phase, name, **details).end()


NOTHING: Final = Recorder()


@dataclass(slots=True)
class Moment:
    """A moment whose time is known, or is told later by a device's event and a moment before."""

    at: int | None = None
    event: Any = None
    before: "Moment | None" = None

    def reached(self) -> bool:
        """Whether the time is known, or can be asked for without waiting."""
        if self.at is not None:
            return True
        assert self.before is not None
        return self.before.reached() and bool(self.event.query())

    def nanoseconds(self) -> int:
        """The time of a moment that is reached."""
        if self.at is None:
            assert self.before is not None
            since = self.before.event.elapsed_time(self.event)
            self.at = self.before.nanoseconds() + round(since * 1e6)
            self.before = None
        return self.at


class HostClock:
    """The host's steady clock, set once by its wall clock, so that a machine's ranks line up."""

    def __init__(self) -> None:
        readings = []
        for _ in range(16):  # of which the one counts that was interrupted least
            before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
            readings.append((after - before, wall - (before + after) // 2))
        self._offset = min(readings)[1]

    def now(self) -> Moment:
        """This moment."""
        return Moment(time.perf_counter_ns() + self._offset)


class DeviceClock:
    """CUDA events on the current stream; their times are asked for when they have passed.

    ``elapsed_time`` is a float32 of milliseconds, which after an hour would be a quarter of a
    millisecond coarse: times are counted from a new reference every step. Waits for the device
    when it is made.
    """

    def __init__(self, host: HostClock) -> None:
        torch.cuda.synchronize()
        self._reference = Moment(event=self._recorded())
        torch.cuda.synchronize()
        self._reference.at = host.now().at

    def _recorded(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def now(self) -> Moment:
        """The moment when the device has done what it was given before."""
        return Moment(event=self._recorded(), before=self._reference)

    def new_reference(self) -> None:
        """Count from here; to be asked for once a step."""
        self._reference = self.now()


class _TraceSpan(Span):
    """A span of a TraceRecorder."""

    __slots__ = ("clock", "details", "name", "phase", "recorder", "start", "step", "stop")

    def __init__(
        self, recorder: "TraceRecorder", phase: Phase, name: str, details: dict[str, Any]
    ) -> None:
        self.recorder, self.phase, self.name, self.details = recorder, phase, name, details
        self.step = recorder.step
        self.clock = recorder.clock_of(phase)
        self.stop: Moment | None = None
        self.start = self.clock.now()

    def note(self, **details: Any) -> None:
        self.details.update(details)

    def end(self) -> None:
        if self.stop is None:
            self.stop = self.clock.now()
            self.recorder.ended(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.details["failed"] = True
        self.end()


class TraceRecorder(Recorder):
    """Keeps events until they are written: at the end of a step, or when there are many.

    On a device, times are known some time after the event: what is not known yet waits for the
    next write. Holds a bounded number of events on the host.
    """

    def __init__(self, write: Callable[[Iterable[TraceEvent]], None]) -> None:
        """``write`` is called with events in the order in which they ended."""
        self._write = write
        self._host = HostClock()
        self._device: DeviceClock | None = None
        self._ended: deque[_TraceSpan] = deque()
        self.step: int | None = None  # the iteration that runs now, from 1

    def use_device_clock(self) -> None:
        """Take times on the device from now on."""
        self._device = DeviceClock(self._host)

    def clock_of(self, phase: Phase) -> HostClock | DeviceClock:
        """The clock for events of this phase."""
        return self._host if self._device is None or phase in get_args(_OnHost) else self._device

    def span(self, phase: Phase, name: str, **details: Any) -> Span:
        """Something begins now."""
        return _TraceSpan(self, phase, name, details)

    @contextmanager
    def in_step(self, number: int) -> Iterator[None]:
        """A whole step; what is known at its end is written behind it."""
        if self._device is not None:
            self._device.new_reference()
        self.step = number
        try:
            with self.span("step", f"step {number}"):
                yield
        finally:
            self.step = None
            self._write(self._known())

    def ended(self, span: _TraceSpan) -> None:
        self._ended.append(span)
        if len(self._ended) >= 2 * _KEPT:
            self.close()
        elif len(self._ended) >= _KEPT:
            self._write(self._known())

    def close(self) -> None:
        """Write what is left; waits for the device."""
        if self._device is not None:
            torch.cuda.synchronize()
        self._write(self._known())

    def _known(self) -> Iterator[TraceEvent]:
        while self._ended:
            span = self._ended[0]
            if span.stop is None or not span.stop.reached():
                return
            self._ended.popleft()
            yield TraceEvent(
                phase=span.phase,
                name=span.name,
                start=span.start.nanoseconds(),
                end=span.stop.nanoseconds(),
                step=span.step,
                details=span.details,
            )
