"""Sends that nobody waits for before the step's end."""

from collections import deque

import torch.distributed as dist
from torch import Tensor


class Sends:
    """Those under way, each with what must not change until it is done."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()

    def add(self, tensor: Tensor, *, target: int, group: dist.ProcessGroup) -> None:
        """Send ``tensor``, which is contiguous, to the rank ``target`` of the world."""
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()[0].wait()
        work = dist.isend(tensor, dst=target, group=group)
        assert work is not None, "this rank is in the group"
        self._under_way.append((work, tensor))

    def drain(self) -> None:
        """Wait for all of them."""
        while self._under_way:
            self._under_way.popleft()[0].wait()
