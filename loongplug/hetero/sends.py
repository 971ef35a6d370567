"""Messages that a rank is sending, and how many there may be at a time."""

import time
from collections import deque
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from loongplug.observe.recorder import NOTHING, Recorder

_LOOK_AGAIN = 0.0002  # seconds, between two looks at what the device has done


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A message under way, and what must not change until it has gone."""

    work: dist.Work
    tensor: Tensor
    microbatch: int


class Sends:
    """Messages from this rank that are under way, of ``most`` microbatches at a time.

    Who sends goes on at once, until messages of ``most`` microbatches have not gone: then it waits
    for those of the oldest. That is what holds a rank back that waits for nothing else, such as
    one whose encoder has no gradients, and it bounds what is kept for its receivers.

    Nobody hangs by that, as long as receivers come to microbatches in order and post a receive at
    the latest then: to come to the one that is waited for, they need what this rank has sent
    before, and of other ranks messages that these make without anything of a later one.

    The host itself waits, on every backend. gloo's ``wait`` lasts until the message has gone, and
    before it ``is_completed`` is never true. A second ``wait`` of gloo's may never end: some
    releases of torch wait for one more message there. NCCL's lets the current stream wait and gives
    the host back at once, which would go on and take memory for one microbatch after the other;
    there ``is_completed`` says what the device has done, and one more ``wait`` whether it failed.
    What the current stream waits for has gone by then, so it holds up no later work.
    """

    def __init__(self, *, most: float, recorder: Recorder = NOTHING, name: str = "sends") -> None:
        """``name``: of the time in which it waits, as the ``recorder`` is told."""
        assert most > 0, most
        self._most = most
        self._recorder = recorder
        self._name = name
        self._under_way: deque[_Sent] = deque()

    def add(self, work: dist.Work | None, tensor: Tensor, *, microbatch: int) -> None:
        """``tensor`` has set out, of ``microbatch``; they come in order.

        Waits for messages of ``microbatch - most`` and before.
        """
        assert work is not None, "this rank is in the group"
        while self._under_way and self._under_way[0].work.is_completed():
            self._under_way.popleft().work.wait()  # says so if it has failed
        self._under_way.append(_Sent(work=work, tensor=tensor, microbatch=microbatch))
        if self._under_way[0].microbatch > microbatch - self._most:
            return
        with self._recorder.span("exchange", self._name):
            while self._under_way[0].microbatch <= microbatch - self._most:
                _wait(self._under_way[0].work)
                self._under_way.popleft()

    def drain(self) -> None:
        """At the step's end: wait for all of them, or let the current stream do so."""
        with self._recorder.span("exchange", self._name):
            while self._under_way:
                self._under_way.popleft().work.wait()


def _wait(work: dist.Work) -> None:
    work.wait()
    if work.is_completed():  # the host itself has waited
        return
    while not work.is_completed():
        time.sleep(_LOOK_AGAIN)
    work.wait()  # raises what ended it
