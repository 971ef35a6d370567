"""Ranks whose GPU takes all of its work from one queue, without tensors that mean anything.

With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` what a rank gives to its GPU begins in that order, whatever
stream it is on. A message begins when the one before on its stream is done, and is done when both
of its ends have begun; until it can begin, nothing behind it does. So a receive that is posted
ahead holds up what follows, where another one stands before it on the same stream.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from stock_passes import Alone

from loongplug.hetero.pass_order import Pipeline

ROW = torch.zeros(1, 1)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One end of a message on a queue; ``number`` counts those of its stream."""

    sends: bool
    stream: tuple[int, int, str]  # source, target, process group
    number: int


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What stands behind goes on when the message is done."""

    message: Message


@dataclass
class Queue:
    """Stands in for ``torch.distributed`` on one rank, and keeps what the rank gives its GPU."""

    rank: int
    given: list[Message | Wait] = field(default_factory=list)
    _counts: Counter[tuple[int, int, str]] = field(default_factory=Counter)

    def get_rank(self) -> int:
        return self.rank

    def isend(self, rows: torch.Tensor, *, dst: int, group: str) -> Any:
        return self._message(sends=True, stream=(self.rank, dst, group))

    def irecv(self, rows: torch.Tensor, *, src: int, group: str) -> Any:
        return self._message(sends=False, stream=(src, self.rank, group))

    def _message(self, *, sends: bool, stream: tuple[int, int, str]) -> Any:
        message = Message(sends=sends, stream=stream, number=self._counts[stream])
        self._counts[stream] += 1
        self.given.append(message)
        return _Work(self, message)


@dataclass(frozen=True)
class _Work:
    queue: Queue
    message: Message

    def is_completed(self) -> bool:
        """As gloo says it; who waits for it to be so has what stands behind wait."""
        return Wait(message=self.message) in self.queue.given

    def wait(self) -> None:
        self.queue.given.append(Wait(message=self.message))


class Queued(Alone):
    """A stage's communicator that gives its messages to a queue, in Megatron's order.

    What goes from one rank to another is one stream, states and gradients of virtual stages alike.
    """

    def __init__(self, config: Any, pipeline: Pipeline, *, queue: Queue) -> None:
        super().__init__(config, pipeline)
        self._queue = queue

    def exchange(
        self,
        *,
        send_next: bool = False,
        recv_prev: bool = False,
        send_prev: bool = False,
        recv_next: bool = False,
    ) -> dict[str, Any]:
        wanted = {"send_next": send_next, "recv_prev": recv_prev}
        wanted |= {"send_prev": send_prev, "recv_next": recv_next}
        order = [*wanted]
        if self.current_stage % 2:
            order = ["recv_prev", "send_next", "recv_next", "send_prev"]
        return {each: self._message(each) for each in order if wanted[each]}

    def _message(self, name: str) -> Any:
        way, where = name.split("_")
        peer = (self.current_stage + (1 if where == "next" else -1)) % self.total_stages
        if way == "send":
            return self._queue.isend(ROW, dst=peer, group="decoder")
        return self._queue.irecv(ROW, src=peer, group="decoder")


def finish(queues: Mapping[int, Sequence[Message | Wait]]) -> bool:
    """Whether all that is on the queues is done."""
    begun: Counter[tuple[tuple[int, int, str], bool]] = Counter()
    at = dict.fromkeys(queues, 0)

    def done(stream: tuple[int, int, str], number: int) -> bool:
        return min(begun[stream, True], begun[stream, False]) > number

    def goes_on(item: Message | Wait) -> bool:
        if isinstance(item, Wait):
            return done(item.message.stream, item.message.number)
        return item.number == 0 or done(item.stream, item.number - 1)

    moved = True
    while moved:
        moved = False
        for rank, items in queues.items():
            while at[rank] < len(items) and goes_on(items[at[rank]]):
                item = items[at[rank]]
                if isinstance(item, Message):
                    begun[item.stream, item.sends] += 1
                at[rank] += 1
                moved = True
    return all(at[rank] == len(items) for rank, items in queues.items())
