"""Bytes that a step holds of its own: on the device, and of it on the host."""

from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from loongplug.estimate.tape import Tape, all_to_alls_apart
from loongplug.platform import Platform
from loongplug.platform.copies import Copies

_STEP = "step"


class Counter(Protocol):
    """Counts what is made between two moments."""

    def begin(self) -> None:
        """From now on; what is there already does not count."""

    def end(self) -> int:
        """Until now; gives the most bytes that were there at one time."""


class DeviceCounter:
    """By torch's allocator on the GPU, which rounds each piece up to 512 bytes."""

    def begin(self) -> None:
        """Start a new peak."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def end(self) -> int:
        """Beyond what was there in the beginning."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self._before


class StorageCounter:
    """By the storages that operations make, on a machine whose memory serves for all."""

    def __init__(self) -> None:
        self.tape = Tape(region=_STEP)
        self._entered = ExitStack()

    def begin(self) -> None:
        """Look at every operation of this thread from now on."""
        self.tape.restart()
        self._entered.enter_context(self.tape.resizes())
        self._entered.enter_context(all_to_alls_apart())
        self._entered.enter_context(self.tape)

    def end(self) -> int:
        """No longer."""
        self._entered.close()
        return self.tape.most


class CountedCopies:
    """A platform's copies; what they take of the host's memory is counted by a tape of its own."""

    def __init__(self, copies: Copies, host: Tape) -> None:
        self._copies = copies
        self._host = host

    def host_like(self, tensor: Tensor) -> Tensor:
        """Counted as the host's, and not as the device's where the two are the same memory."""
        with _disable_current_modes():
            found = self._copies.host_like(tensor)
        self._host.see(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)


def count_on(platform: Platform) -> tuple[Counter, Tape]:
    """Counters for this process; from now on ``platform`` tells them what it moves."""
    host = Tape(region=_STEP)
    copies, release = platform.copies, platform.release
    counter = DeviceCounter() if platform.name == "cuda" else StorageCounter()

    def released(storage: torch.UntypedStorage) -> None:
        release(storage)
        if isinstance(counter, StorageCounter):
            counter.tape.given_back(storage)

    vars(platform).update(copies=lambda: CountedCopies(copies(), host), release=released)
    return counter, host
