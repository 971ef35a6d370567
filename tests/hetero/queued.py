"""In the place of ``torch.distributed``: what ranks give their GPUs, as programs of the clock.

And how their messages go there: behind a handshake, or in a device's streams.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from loongplug.hetero import exchange, piece_carrier, wire
from loongplug.simulate.order import Deadlock, order
from loongplug.simulate.programs import Act, Build, End, Meet, Post, Programs, RankMessage, Wait

Stream = tuple[int, int, Hashable]  # a source, a target, and their group


class Queues:
    """Those of all ranks, which come to them one after the other (:meth:`turn_to`)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rank, self.build = 0, Build()
        self.given: dict[int, list[Act]] = {}
        # The rows of each message of a stream, at the end that sends and at the other one.
        self.rows = {sends: defaultdict[Stream, list[int]](list) for sends in (True, False)}
        for module in (exchange, piece_carrier, wire):
            patch.setattr(module, "dist", self)

    def turn_to(self, rank: int) -> None:
        self.rank = rank
        self.mine = self.given[rank] = []

    def get_rank(self) -> int:
        return self.rank

    def get_process_group_ranks(self, group: Sequence[int]) -> Sequence[int]:
        return group

    def isend(self, rows: torch.Tensor, *, dst: int, group: Hashable) -> "Sent":
        return self._message((self.rank, dst, group), rows, sends=True)

    def irecv(self, rows: torch.Tensor, *, src: int, group: Hashable) -> "Sent":
        return self._message((src, self.rank, group), rows, sends=False)

    def all_to_all_single(
        self, rows: torch.Tensor, out: torch.Tensor, coming: Any, given: Any, group: Sequence[int]
    ) -> None:
        assert (len(rows), len(out)) == (sum(coming), sum(given))
        self.meet(group)

    def broadcast(self, rows: torch.Tensor, *, src: int, group: Sequence[int]) -> None:
        assert src in group
        self.meet(group)

    def meet(self, group: Sequence[int]) -> None:
        if len(group) > 1:
            self.does(Meet(self.build.group(group)))

    def does(self, act: Act) -> None:
        self.mine.append(act)

    def programs(self) -> Programs:
        return self.build.programs([self.given[rank] for rank in sorted(self.given)])

    def _message(self, stream: Stream, rows: torch.Tensor, *, sends: bool) -> "Sent":
        messages = self.rows[sends][stream]
        message = self.build.message(stream, len(messages), eager=False)
        messages.append(len(rows))
        self.does(Post(((message, sends),)))
        return Sent(self, (message, sends))


@dataclass(frozen=True)
class Sent:
    """One end of a message."""

    queues: Queues
    end: End

    def is_completed(self) -> bool:
        """As gloo says it; who waits for it to be so has what stands behind wait."""
        return any(isinstance(x, Wait) and self.end in x.ends for x in self.queues.mine)

    def wait(self) -> None:
        self.queues.does(Wait((self.end,)))


def finish(programs: Programs) -> bool:
    """Whether all ranks come to the end of their programs."""
    try:
        order(programs)
    except Deadlock:
        return False
    return True


def with_shapes(programs: Programs, *, of: Callable[[Hashable], bool]) -> Programs:
    """Programs with a message ahead of each that is ``of``, for its shape; both ends wait for it.

    Those of one :class:`Post` are one handshake, as in Megatron.
    """
    messages = programs.messages
    announced = [number for number, each in enumerate(messages) if of(each.stream)]
    ahead = {each: len(messages) + number for number, each in enumerate(announced)}
    shapes_of = (messages[each] for each in announced)
    shapes = (RankMessage(("shape of", each.stream), each.which, each.eager) for each in shapes_of)

    def acts(own: Sequence[Act]) -> Iterator[Act]:
        for act in own:
            if isinstance(act, Post):
                ends = tuple((ahead[each], sends) for each, sends in act.ends if each in ahead)
                yield from (Post(ends), Wait(ends)) if ends else ()
            yield act

    ranks = tuple(tuple(acts(own)) for own in programs.ranks)
    return replace(programs, ranks=ranks, messages=(*messages, *shapes))


def on_streams(
    programs: Programs,
    *,
    communicator: Callable[[Hashable], Hashable],
    pool: int = 32,  # torch hands out so many of one priority, and then the same again
    one_queue: bool = False,
) -> Programs:
    """On devices, where each communicator of a rank has a stream, and its messages go in turn.

    ``communicator`` has that of a message's stream, None where none is used. Streams come from a
    ``pool``: behind so many communicators, in the order in which the rank uses them first, two
    share one. With ``one_queue`` (``CUDA_DEVICE_MAX_CONNECTIONS=1``) what a rank gives to its
    device begins in that order, so that a message that cannot begin holds up all behind it.
    """
    behind = [[*each.behind] for each in programs.messages]

    def acts(own: Sequence[Act]) -> Iterator[Act]:
        streams: dict[Hashable, int] = {}
        latest: dict[int, End] = {}  # by stream
        for act in own:
            if not isinstance(act, Post):
                yield act
                continue
            for message, sends in act.ends:
                used = communicator(programs.messages[message].stream)
                if used is not None:
                    stream = streams.setdefault(used, len(streams)) % pool
                    if stream in latest:
                        behind[message].append(latest[stream][0])
                        if one_queue:
                            yield Wait((latest[stream],))
                    latest[stream] = message, sends
                yield Post(((message, sends),))

    ranks = tuple(tuple(acts(own)) for own in programs.ranks)
    each_behind = zip(programs.messages, behind, strict=True)
    messages = tuple(each._replace(behind=tuple(others)) for each, others in each_behind)
    return replace(programs, ranks=ranks, messages=messages)
