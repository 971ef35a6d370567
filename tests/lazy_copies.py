"""A queue of copies that is as late as it may be, for tests of what waits for what."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor


def poison(tensor: Tensor) -> None:
    """NaN in every type of numbers with a point."""
    tensor.view(-1).view(torch.uint8).fill_(0xFF) if tensor.numel() else None


class LazyCopies:
    """Copies are made when the computation waits for a mark behind them, and not before.

    Until then a target is poison. So is what comes of a source that nobody holds any more when
    the copy is made, and of a copy that was queued without following the computation. The call
    number ``forgotten`` of ``follow`` and ``wait`` does nothing.
    """

    def __init__(self, *, forgotten: int | None = None) -> None:
        self.waits = 0
        self._forgotten = forgotten
        self._follows = False
        self._queue: list[Callable[[], None]] = []
        self._done = 0
        self._kept: list[tuple[int, Tensor]] = []  # and how far the queue has to come first

    def _remembered(self) -> bool:
        self.waits += 1
        return self.waits - 1 != self._forgotten

    def host_like(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor)
        poison(host)
        return host

    def follow(self) -> None:
        self._follows = self._remembered()

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape
        poison(target)
        read, written = weakref.ref(source), weakref.ref(target)
        follows = self._follows

        def late() -> None:
            found, to = read(), written()
            if to is None:
                return
            if found is None or not follows:
                poison(to)
            else:
                with torch.no_grad():
                    to.copy_(found)

        self._queue.append(late)

    def keep(self, tensor: Tensor) -> None:
        self._kept.append((len(self._queue), tensor))

    def mark(self) -> int:
        self._follows = False
        return len(self._queue)

    def wait(self, mark: int) -> None:
        if not self._remembered():
            return
        while self._done < mark:
            self._queue[self._done]()
            self._done += 1
        self._kept = [(place, kept) for place, kept in self._kept if place > self._done]
