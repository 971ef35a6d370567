"""Copies between the device and the host that run beside the computation."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Copies:
    """A queue of copies; *computation* is whatever the caller's own stream has been given.

    A method without a body has nothing to do where all work is done in the order given. Nothing
    here makes the host wait, and neither queue waits for the other but by ``follow`` and ``wait``.
    The memory of a copy's ends has to stay what it is until the computation has waited for a mark
    behind the copy.
    """

    def host_like(self, tensor: Tensor) -> Tensor:
        """Memory on the host of the shape and dtype of ``tensor``, fit for such copies."""
        raise NotImplementedError

    def follow(self) -> None:
        """Copies from now on start when the computation given so far is done."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; one of ``target`` and ``source`` is on the host."""
        raise NotImplementedError

    def keep(self, tensor: Tensor) -> None:
        """The memory of ``tensor`` is reused only after all copies that are in the queue now.

        For copies that no other call waits for.
        """

    def mark(self) -> Any:
        """The place in the queue behind what it has been given so far."""

    def wait(self, mark: Any) -> None:
        """Computation from now on starts when the queue has come to ``mark``."""


class CudaCopies(Copies):
    """A stream of its own and pinned memory."""

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """Made for the first copy: before Megatron starts, every rank's current GPU is GPU 0."""
        return torch.cuda.Stream()

    def host_like(self, tensor: Tensor) -> Tensor:
        """Pinned, from torch's cache, which takes it back only when its copies are done."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def follow(self) -> None:
        """The stream waits for the caller's."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, target: Tensor, source: Tensor) -> None:
        """On the stream; the host goes on."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor) -> None:
        """torch's cache knows that the stream uses it."""
        tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """An event of the stream."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """The caller's stream waits for the event."""
        torch.cuda.current_stream().wait_event(mark)


class HostCopies(Copies):
    """Copies on a CPU, whose one memory is device and host, and whose work is done in order."""

    def host_like(self, tensor: Tensor) -> Tensor:
        """Memory beside that of ``tensor``, of the same kind."""
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy at once."""
        with torch.no_grad():
            target.copy_(source)
