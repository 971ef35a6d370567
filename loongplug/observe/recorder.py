"""What code reports events to: a recorder that drops them, and one that keeps them.

A recorder is handed down: by constructor or as a plain callback. Code that nobody handed one
reports to ``NOTHING``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, Self

from loongplug.observe.clocks import Clock, DeviceClock, HostClock
from loongplug.observe.trace_file import TraceEvent

Phase = Literal[
    "step",
    "forward",  # of the decoder: whatever of a chunk's forward is not the encoder's
    "backward",
    "forward_backward",  # the overlapped schedule's combined call
    "encoder_forward",
    "encoder_backward",
    "gradients",  # their finalisation
    "optimizer",
    "exchange",  # of features, between the ranks that make and those that take them
    "p2p",  # between pipeline stages
    "collective",
    "wait",  # for a transfer that was started before
    "data",
    "evaluation",
    "checkpoint",
    "switch",  # of the parallel state
]

# Work of the host, whatever the device does meanwhile.
_ON_HOST: Final[frozenset[str]] = frozenset({"data", "evaluation", "checkpoint"})

# Finished events are written at the latest when there are so many.
_KEPT: Final = 4096


class Span:
    """Something that has begun. Ends by :meth:`end` or with the block that it is entered for.

    This one keeps nothing.
    """

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


class _TraceSpan(Span):
    """A span of a TraceRecorder; its times are its clock's stamps until it is written."""

    __slots__ = ("clock", "details", "name", "phase", "recorder", "start", "step", "stop")

    def __init__(
        self, recorder: "TraceRecorder", phase: Phase, name: str, details: dict[str, Any]
    ) -> None:
        self.recorder = recorder
        self.phase = phase
        self.name = name
        self.details = details
        self.step = recorder.step
        self.clock = recorder.clock_of(phase)
        self.stop: Any = None
        self.start: Any = self.clock.now()

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
        self._device: Clock = self._host
        self._ended: deque[_TraceSpan] = deque()
        self.step: int | None = None  # the iteration that runs now, from 1

    def use_device_clock(self, clock: DeviceClock) -> None:
        """Take times on the device from now on."""
        self._device = clock

    def clock_of(self, phase: Phase) -> Clock:
        """The clock for events of this phase."""
        return self._host if phase in _ON_HOST else self._device

    def span(self, phase: Phase, name: str, **details: Any) -> Span:
        """Something begins now."""
        return _TraceSpan(self, phase, name, details)

    @contextmanager
    def in_step(self, number: int) -> Iterator[None]:
        """A whole step; what is known at its end is written behind it."""
        self._device.new_reference()
        self.step = number
        try:
            with self.span("step", f"step {number}"):
                yield
        finally:
            self.step = None
            self._flush()

    def ended(self, span: _TraceSpan) -> None:
        self._ended.append(span)
        if len(self._ended) >= _KEPT:
            self._flush(wait=len(self._ended) >= 2 * _KEPT)

    def close(self) -> None:
        """Write what is left; waits for the device."""
        self._flush(wait=True)

    def _flush(self, *, wait: bool = False) -> None:
        if wait:
            self._device.synchronize()
        self._write(self._known())

    def _known(self) -> Iterator[TraceEvent]:
        while self._ended:
            span = self._ended[0]
            if not span.clock.reached(span.stop):
                return
            self._ended.popleft()
            yield TraceEvent(
                phase=span.phase,
                name=span.name,
                start=span.clock.nanoseconds(span.start),
                end=span.clock.nanoseconds(span.stop),
                step=span.step,
                details=span.details,
            )
