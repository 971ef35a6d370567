"""Bytes that a step holds of its own: on the device, and of it on the host."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from loongplug.estimate.live_bytes import Tape
from loongplug.platform.platforms import Platform
from loongplug.platform.prefetch import Copies

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


@contextmanager
def all_to_alls_apart() -> Iterator[None]:
    """Inside, ``dist.all_to_all_single`` moves copies that no tape counts.

    Gloo's threads let go of what they moved at a moment of their own, when the collective has
    returned already. A storage that the caller has dropped would count until then, or not.
    """
    move = dist.all_to_all_single

    @wraps(move)
    def moved(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch.no_grad():
            arrived = torch.empty_like(output)
            work = move(arrived, input.clone(), *args, **kwargs)
            if work is not None:
                work.wait()
            output.copy_(arrived)
        return work

    dist.all_to_all_single = moved
    try:
        yield
    finally:
        dist.all_to_all_single = move
