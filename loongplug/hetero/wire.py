"""Rows of pieces between ranks, point to point: one way for each kind of rows.

Both ends of a message know from the text how many rows it has, and come to pieces in one order. So
nothing is announced, and a message without rows is left out on both sides. With NCCL, two ranks
have one queue for all that they send each other in a process group. So each kind of rows has groups
of its own: what goes there and what comes back would wait for one another. And it has one for what
goes to higher ranks and one for what goes to lower ones: two ranks of a first stage that hold parts
of one sequence send each other features, and each posts receives early.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.exchange import own_storage, put_together, taken
from loongplug.hetero.operations import Cargo
from loongplug.hetero.routes import Rows, size
from loongplug.hetero.sends import Sends
from loongplug.observe.recorder import NOTHING, Recorder, Span

WINDOW = 2  # pieces whose features or states are received ahead

Over = Mapping[bool, dist.ProcessGroup | None]  # by whether a message goes to a higher rank


def window(what: Cargo) -> int:
    """How many pieces are received ahead of the one that is waited for.

    Where a GPU has one queue for all its work, more of them would hold up what the others need to
    go on.
    """
    return 1 if what.back else WINDOW


@dataclass(frozen=True, kw_only=True)
class PieceMessage:
    """Some ``rows`` of a piece, to or from another rank, or kept for this one itself.

    They are places in what this rank gives of the piece, or takes of it.
    """

    peer: int
    rows: Rows


@dataclass(frozen=True, kw_only=True)
class PieceEnd:
    """What one rank gives or takes of a piece: its messages' rows, each of them in one message.

    One without rows does not travel, but its piece counts as received ahead. ``microbatch`` is the
    piece's; None where sends are not bounded by microbatches.
    """

    messages: tuple[PieceMessage, ...]
    microbatch: int | None = None

    @property
    def rows(self) -> int:
        """How many there are in all."""
        return sum(size(each.rows) for each in self.messages)


NOTHING_OF_IT = PieceEnd(messages=())


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What one rank gives and takes of one kind in a step, by piece, in their order.

    Pieces of which it gives or takes nothing are left out. What it takes has so much ``width``, and
    everything is of ``dtype``.
    """

    given: Mapping[int, PieceEnd]
    taken: Mapping[int, PieceEnd]
    width: int
    dtype: torch.dtype


@dataclass(kw_only=True)
class CargoOfStep:
    """One kind of rows on one rank in a step, and where they are. All by piece."""

    ends: Ends
    to_post: deque[int]
    under_way: dict[int, list[tuple[PieceMessage, Tensor, dist.Work]]] = field(default_factory=dict)
    kept: dict[int, Tensor] = field(default_factory=dict)  # for this rank itself


class Wire:
    """One rank's ends of all that goes from an encoder's ranks to others, and comes back."""

    def __init__(
        self,
        groups: Mapping[Cargo, Over],
        *,
        most: float,
        device: torch.device,
        recorder: Recorder = NOTHING,
    ) -> None:
        """Messages of ``most`` microbatches may be under way (:class:`Sends`)."""
        self._groups = groups
        self._device = device
        self._recorder = recorder
        self._rank = dist.get_rank()
        self.windows = {what: window(what) for what in groups}
        self.sends = {what: Sends(most=most, recorder=recorder, name=what.waits) for what in groups}
        self.ways: dict[Cargo, CargoOfStep] = {}  # of the step

    def begin(self, ends: Mapping[Cargo, Ends]) -> None:
        """A step begins, with these ends: the first receives are posted."""
        assert not self.ways, "the last step has not ended"
        for what, each in ends.items():
            come = (piece for piece, end in each.taken.items() if self._from_others(end))
            self.ways[what] = CargoOfStep(ends=each, to_post=deque(come))
            self._post(what)

    def send(self, what: Cargo, piece: int, rows: Tensor) -> None:
        """``rows`` [rows, width] of a piece set out to all who need some of them."""
        way = self.ways[what]
        end, dtype = way.ends.given.get(piece, NOTHING_OF_IT), way.ends.dtype
        assert rows.dtype == dtype, f"{rows.dtype} where {dtype} is received"
        assert not end.messages or len(rows) == end.rows, (piece, rows.shape, end)
        for message in end.messages:
            part = taken(rows.detach(), message.rows)  # [rows, width]
            if message.peer == self._rank:
                way.kept[piece] = own_storage(part)  # not all that it came with
            elif len(part):
                self._send(what, part.contiguous(), message.peer, end=end)

    def receive(self, what: Cargo, piece: int) -> Tensor:
        """What this rank takes of a piece, [rows, width]; each piece once, in their order.

        Before it is waited for, the next one may come, too.
        """
        way = self.ways[what]
        end = way.ends.taken.get(piece, NOTHING_OF_IT)
        parts = [(each, way.kept.pop(piece)) for each in end.messages if each.peer == self._rank]
        if self._from_others(end):
            assert piece in way.under_way, f"{piece} is not the next of {what.said}"
            coming = way.under_way.pop(piece)
            self._post(what)
            for message, rows, work in coming:
                with self._span("receive", what, rows, source=message.peer, end=end):
                    work.wait()
                parts.append((message, rows))
        assert sum(len(part) for _, part in parts) == end.rows, (piece, end)
        placed = [(message.rows, part) for message, part in parts]
        return put_together(placed, rows=end.rows, like=self.empty(what, 0))

    def rows(self, what: Cargo, piece: int) -> int:
        """How many this rank gives of a piece."""
        return self.ways[what].ends.given.get(piece, NOTHING_OF_IT).rows

    def drain(self) -> None:
        """At the step's end: wait for what is still being sent."""
        for each in self.sends.values():
            each.drain()
        for what, way in self.ways.items():
            left = [*way.to_post, *way.under_way, *way.kept]
            assert not left, f"nobody took {what.said} of pieces {left}"
        self.ways.clear()

    def _from_others(self, end: PieceEnd) -> list[PieceMessage]:
        return [each for each in end.messages if each.peer != self._rank]

    def _send(self, what: Cargo, rows: Tensor, target: int, *, end: PieceEnd) -> None:
        with self._span("send", what, rows, target=target, end=end):
            group = self._groups[what][self._rank < target]
            work = dist.isend(rows, dst=target, group=group)
        self.sends[what].add(work, rows, microbatch=end.microbatch or 0)

    def _post(self, what: Cargo) -> None:
        way = self.ways[what]
        while way.to_post and len(way.under_way) < self.windows[what]:
            piece = way.to_post.popleft()
            coming = way.under_way[piece] = []
            for each in self._from_others(way.ends.taken[piece]):
                if size(each.rows):
                    rows = self.empty(what, size(each.rows))
                    group = self._groups[what][each.peer < self._rank]
                    work = dist.irecv(rows, src=each.peer, group=group)
                    assert work is not None, "this rank is in the group"
                    coming.append((each, rows, work))

    def empty(self, what: Cargo, rows: int) -> Tensor:
        """[rows, width], as this rank takes them."""
        ends = self.ways[what].ends
        return torch.empty(rows, ends.width, dtype=ends.dtype, device=self._device)

    def _span(self, verb: str, what: Cargo, rows: Tensor, *, end: PieceEnd, **side: int) -> Span:
        if end.microbatch is not None:
            side["microbatch"] = end.microbatch
        return self._recorder.span("exchange", f"{verb} {what.said}", bytes=rows.nbytes, **side)
