"""Rows of pieces between ranks, point to point: one way for each kind of rows.

Both ends of a message know from the text how many rows it has, and come to pieces in one order. So
nothing is announced, and a message without rows is left out on both sides. With NCCL, two ranks
have one queue for all that they send each other in a process group. So each kind of rows has groups
of its own: what goes there and what comes back would wait for one another.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.exchange import put, taken
from loongplug.hetero.routes import Rows, size
from loongplug.hetero.sends import Sends
from loongplug.observe.recorder import NOTHING, Recorder, Span

WINDOW = 2  # pieces whose features or states are received ahead

Over = Callable[[int, int], dist.ProcessGroup]  # what a message goes over, by source and target


class What(Enum):
    """A kind of rows, and how a trace calls it and the wait for its sends."""

    FEATURES = "features", "sends", False
    GRADIENTS = "gradients", "sends", True  # of features
    STATES = "states", "sends of states between stages", False  # of a stage, for the next
    STATE_GRADIENTS = "gradients", "sends of gradients between stages", True

    def __init__(self, said: str, waits: str, back: bool) -> None:
        """``back``: they come back from where others went."""
        self.said, self.waits, self.back = said, waits, back


@dataclass(frozen=True, kw_only=True)
class Message:
    """Some ``rows`` of a piece, to or from another rank, or kept for this one itself.

    They are places in what this rank gives of the piece, or takes of it.
    """

    peer: int
    rows: Rows


@dataclass(frozen=True, kw_only=True)
class PieceEnd:
    """What one rank gives or takes of a piece: ``rows`` in all, by its messages.

    ``microbatch`` is the piece's; None where sends are not bounded by microbatches.
    """

    rows: int
    messages: tuple[Message, ...] = ()
    microbatch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What one rank gives and takes of one kind in a step, by piece, in their order.

    What it takes has so much ``width``, and everything is of ``dtype``.
    """

    given: Mapping[int, PieceEnd]
    taken: Mapping[int, PieceEnd]
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class _Coming:
    """A message whose ``rows`` [rows, width] are being received."""

    message: Message
    rows: Tensor
    work: dist.Work


@dataclass(kw_only=True)
class Way:
    """One kind of rows on one rank: what they go over, and where those of the step are.

    ``window`` pieces are received ahead of the one that is waited for. Where a GPU has one queue
    for all its work, more of them would hold up what the others need to go on.
    """

    over: Over
    window: int
    sends: Sends
    ends: Ends | None = None
    to_post: deque[int] = field(default_factory=deque)  # pieces
    under_way: dict[int, list[_Coming]] = field(default_factory=dict)  # by piece
    kept: dict[int, Tensor] = field(default_factory=dict)  # for this rank itself, by piece


class Wire[Spec]:
    """One rank's ends of all that goes between an encoder's ranks, or from there and back.

    Which messages these are follows from what all know of a step, its ``Spec``.
    """

    def __init__(
        self,
        groups: Mapping[What, Over],
        *,
        ends: Callable[[What, Spec], Ends],
        most: float,
        device: torch.device,
        recorder: Recorder = NOTHING,
        together: dist.ProcessGroup | None = None,
    ) -> None:
        """``ends``: what of each kind this rank has in a step. Pure.

        Messages of ``most`` microbatches may be under way (:class:`Sends`). ``together`` has the
        ranks that take the same rows as this one, of which the first receives them; None where this
        rank is alone.
        """
        self.device = device
        self._ends = ends
        self._recorder = recorder
        self._together = together
        self._rank = dist.get_rank()
        self.ways = {
            what: Way(
                over=over,
                window=1 if what.back else WINDOW,
                sends=Sends(most=most, recorder=recorder, name=what.waits),
            )
            for what, over in groups.items()
        }

    def begin(self, spec: Spec, *, trains: bool) -> None:
        """A step begins: the first receives are posted. ``trains``: gradients come back."""
        for what, way in self.ways.items():
            if trains or not what.back:
                assert way.ends is None, "the last step has not ended"
                way.ends = self._ends(what, spec)
                way.to_post.extend(
                    piece for piece, end in way.ends.taken.items() if self._from_others(end)
                )
                self._post(what)

    def send(self, what: What, piece: int, rows: Tensor) -> None:
        """``rows`` [rows, width] of a piece set out to all who need some of them."""
        way, ends = self._begun(what)
        end = ends.given[piece]
        assert rows.dtype == ends.dtype, f"{rows.dtype} where {ends.dtype} is received"
        assert len(rows) == end.rows, (piece, rows.shape, end)
        for message in end.messages:
            part = taken(rows.detach(), message.rows)  # [rows, width]
            if message.peer == self._rank:
                way.kept[piece] = own_storage(part)  # not all that it came with
            elif len(part):
                self._send(what, part.contiguous(), message.peer, end=end)

    def receive(self, what: What, piece: int) -> Tensor:
        """What this rank takes of a piece, [rows, width]; each piece once, in their order.

        Before it is waited for, the next one may come, too. Ranks of one ``together`` enter
        together.
        """
        way, ends = self._begun(what)
        end = ends.taken[piece]
        parts = [(each, way.kept.pop(piece)) for each in end.messages if each.peer == self._rank]
        if self._from_others(end):
            assert piece in way.under_way, f"{piece} is not the next of {what.said}"
            coming = way.under_way.pop(piece)
            self._post(what)
            for each in coming:
                with self._span("receive", what, each.rows, source=each.message.peer, end=end):
                    each.work.wait()
                parts.append((each.message, each.rows))
        whole = self._put_together(what, parts, rows=end.rows)
        if self._together is not None and end.rows:
            dist.broadcast(whole, group=self._together, group_src=0)
        else:
            assert sum(len(part) for _, part in parts) == end.rows, (piece, end)
        return whole

    def drain(self) -> None:
        """At the step's end: wait for what is still being sent."""
        for what, way in self.ways.items():
            way.sends.drain()
            left = [*way.to_post, *way.under_way, *way.kept]
            assert not left, f"nobody took {what.said} of pieces {left}"
            way.ends = None

    def _begun(self, what: What) -> tuple[Way, Ends]:
        way = self.ways[what]
        assert way.ends is not None, f"no step with {what.said} has begun"
        return way, way.ends

    def _from_others(self, end: PieceEnd) -> list[Message]:
        """Also messages without rows: their pieces count as received ahead."""
        return [each for each in end.messages if each.peer != self._rank]

    def _send(self, what: What, rows: Tensor, target: int, *, end: PieceEnd) -> None:
        way = self.ways[what]
        with self._span("send", what, rows, target=target, end=end):
            work = dist.isend(rows, dst=target, group=way.over(self._rank, target))
        way.sends.add(work, rows, microbatch=end.microbatch or 0)

    def _post(self, what: What) -> None:
        way, ends = self._begun(what)
        while way.to_post and len(way.under_way) < way.window:
            piece = way.to_post.popleft()
            come = [each for each in self._from_others(ends.taken[piece]) if size(each.rows)]
            way.under_way[piece] = [self._coming(what, each) for each in come]

    def _coming(self, what: What, message: Message) -> _Coming:
        rows = self._empty(what, size(message.rows))
        group = self.ways[what].over(message.peer, self._rank)
        work = dist.irecv(rows, src=message.peer, group=group)
        assert work is not None, "this rank is in the group"
        return _Coming(message=message, rows=rows, work=work)

    def _put_together(
        self, what: What, parts: Sequence[tuple[Message, Tensor]], *, rows: int
    ) -> Tensor:
        """All ``rows`` of a piece, each at its place, [rows, width]."""
        if len(parts) == 1 and len(parts[0][1]) == rows:
            return parts[0][1]
        whole = self._empty(what, rows)
        for message, part in parts:
            put(part, message.rows, into=whole)
        return whole

    def _empty(self, what: What, rows: int) -> Tensor:
        _, ends = self._begun(what)
        return torch.empty(rows, ends.width, dtype=ends.dtype, device=self.device)

    def _span(self, verb: str, what: What, rows: Tensor, *, end: PieceEnd, **side: int) -> Span:
        if end.microbatch is not None:
            side["microbatch"] = end.microbatch
        return self._recorder.span("exchange", f"{verb} {what.said}", bytes=rows.nbytes, **side)


def own_storage(rows: Tensor) -> Tensor:
    """Clone views: a view keeps alive all that it is a part of."""
    if rows.untyped_storage().nbytes() == rows.nbytes:
        return rows
    return rows.clone()
