"""When something happened, in nanoseconds since 1970, on the host or on a CUDA device.

A clock takes stamps cheaply, and tells later what time they stand for.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch


class HostClock:
    """The host's steady clock, set once by its wall clock, so that a machine's ranks line up."""

    def __init__(self) -> None:
        self._offset = _wall_offset()

    def now(self) -> int:
        """A stamp of this moment: the time itself."""
        return time.perf_counter_ns() + self._offset

    def new_reference(self) -> None:
        """The host's clock needs no reference."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def reached(self, stamp: int) -> bool:
        """Whether the time is known: always."""
        return True

    def nanoseconds(self, stamp: int) -> int:
        """The time of a stamp: the stamp."""
        return stamp


def _wall_offset() -> int:
    """Wall clock minus steady clock, from the reading that was interrupted least."""
    readings = []
    for _ in range(16):
        before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


@dataclass
class _Reference:
    """An event whose time is known, or will be by the reference before it."""

    _event: Any
    _at: int | None = None
    _before: "_Reference | None" = None

    def reached(self) -> bool:
        return self._at is not None or bool(self._event.query())

    def nanoseconds(self) -> int:
        if self._at is None:
            assert self._before is not None
            self._at = self._before.time_of(self._event)
            self._before = None
        return self._at

    def time_of(self, event: Any) -> int:
        return self.nanoseconds() + round(self._event.elapsed_time(event) * 1e6)


class DeviceClock:
    """CUDA events on the current stream; their times are asked for when they have passed.

    ``elapsed_time`` is a float32 of milliseconds, which after an hour would be a quarter of a
    millisecond coarse: times are counted from a new reference every step. Waits for the device
    when it is made, and never again before :meth:`synchronize`.
    """

    def __init__(self, host: HostClock) -> None:
        torch.cuda.synchronize()
        event = self._recorded()
        torch.cuda.synchronize()
        self._reference = _Reference(event, host.now())
        self._free: list[Any] = []

    def _recorded(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def now(self) -> tuple[Any, _Reference]:
        """An event that the device reaches when it has done what it was given before."""
        if not self._free:
            return self._recorded(), self._reference
        event = self._free.pop()
        event.record()
        return event, self._reference

    def new_reference(self) -> None:
        """Count from here; to be asked for once a step."""
        self._reference = _Reference(self._recorded(), _before=self._reference)

    def synchronize(self) -> None:
        """Return when every stamp is reached."""
        torch.cuda.synchronize()

    def reached(self, stamp: tuple[Any, _Reference]) -> bool:
        """Whether the stamp's time is known; then that of every earlier one is too. No waiting."""
        event, reference = stamp
        return reference.reached() and bool(event.query())  # they may be on different streams

    def nanoseconds(self, stamp: tuple[Any, _Reference]) -> int:
        """The time of a stamp that is reached, asked once: the event is used again."""
        event, reference = stamp
        time_of = reference.time_of(event)
        self._free.append(event)
        return time_of


Clock = HostClock | DeviceClock
