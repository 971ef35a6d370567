"""Rows of pieces between ranks, point to point, and how many messages there may be at a time.

Both ends of a message know from the text how many rows it has, and come to pieces in one order. So
nothing is announced, and a message without rows is left out on both sides. With NCCL, two ranks
have one queue for all that they send each other in a process group. So each kind of rows has a
group of its own: what goes there and what comes back would wait for one another. Two ranks send
each other a kind one way alone.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.exchange import own_storage, put_together, taken
from loongplug.hetero.operations import Cargo
from loongplug.hetero.row_moves import RowMove, size
from loongplug.observe.recorder import NOTHING, Recorder, Span

# Pieces whose features or states are received ahead of the one that is waited for; of gradients it
# is one. Where a GPU has one queue for all its work, more would hold up what others need to go on.
WINDOW = 2

_LOOK_AGAIN = 0.0002  # seconds, between two looks at what the device has done


@dataclass(frozen=True, kw_only=True)
class StepMoves:
    """Rows of one kind that one rank gives and takes in a step, by piece, in their order.

    One without rows does not travel, but its piece counts as received ahead. ``microbatches`` are
    the pieces'; there are none where sends are not bounded by them. What this rank takes has so
    much ``width``, and everything is of ``dtype``. Places at the other ends may be unknown here.
    """

    moves: Mapping[int, Sequence[RowMove]]
    microbatches: Mapping[int, int]
    width: int
    dtype: torch.dtype


@dataclass(kw_only=True)
class CargoOfStep:
    """The rows of one kind on one rank in a step, by piece, and where they are."""

    known: StepMoves
    to_post: deque[int]
    under_way: dict[int, list[tuple[RowMove, Tensor, dist.Work]]] = field(default_factory=dict)
    kept: dict[int, Tensor] = field(default_factory=dict)  # for this rank itself


class Wire:
    """One rank's ends of all that goes from an encoder's ranks to others, and comes back."""

    def __init__(
        self,
        groups: Mapping[Cargo, dist.ProcessGroup | None],
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
        self.windows = {what: 1 if what.back else WINDOW for what in groups}
        self.sends = {what: Sends(most=most, recorder=recorder, name=what.waits) for what in groups}
        self.ways: dict[Cargo, CargoOfStep] = {}  # of the step

    def begin(self, moves: Mapping[Cargo, StepMoves]) -> None:
        """A step begins, with these moves: the first receives are posted."""
        assert not self.ways, "the last step has not ended"
        for what, each in moves.items():
            way = self.ways[what] = CargoOfStep(known=each, to_post=deque())
            way.to_post += (piece for piece in each.moves if self._come(what, piece))
            self._post(what)

    def send(self, what: Cargo, piece: int, rows: Tensor) -> None:
        """``rows`` [rows, width] of a piece set out to all who need some of them."""
        way = self.ways[what]
        dtype, given = way.known.dtype, self._given(what, piece)
        assert rows.dtype == dtype, f"{rows.dtype} where {dtype} is received"
        assert not given or len(rows) == self.rows(what, piece), (piece, rows.shape, given)
        for move in given:
            part = taken(rows.detach(), move.given)  # [rows, width]
            if move.target == self._rank:
                way.kept[piece] = own_storage(part)  # not all that it came with
            elif len(part):
                self._send(what, part.contiguous(), move)

    def receive(self, what: Cargo, piece: int) -> Tensor:
        """What this rank takes of a piece, [rows, width]; each piece once, in their order.

        Before it is waited for, the next one may come, too.
        """
        way = self.ways[what]
        moves = [x for x in way.known.moves.get(piece, ()) if x.target == self._rank]
        parts = [(x.placed, way.kept.pop(piece)) for x in moves if x.source == self._rank]
        if self._come(what, piece):
            assert piece in way.under_way, f"{piece} is not the next of {what.said}"
            coming = way.under_way.pop(piece)
            self._post(what)
            for move, rows, work in coming:
                with self._span("receive", what, rows, piece, source=move.source):
                    work.wait()
                parts.append((move.placed, rows))
        count = sum(size(x.placed) for x in moves)
        assert sum(len(part) for _, part in parts) == count, (piece, moves)
        return put_together(parts, rows=count, like=self.empty(what, 0))

    def rows(self, what: Cargo, piece: int) -> int:
        return sum(size(move.given) for move in self._given(what, piece))

    def drain(self) -> None:
        """Wait, at the step's end, for what is still being sent."""
        for each in self.sends.values():
            each.drain()
        for what, way in self.ways.items():
            left = [*way.to_post, *way.under_way, *way.kept]
            assert not left, f"nobody took {what.said} of pieces {left}"
        self.ways.clear()

    def _given(self, what: Cargo, piece: int) -> list[RowMove]:
        moves = self.ways[what].known.moves.get(piece, ())
        return [each for each in moves if each.source == self._rank]

    def _come(self, what: Cargo, piece: int) -> list[RowMove]:
        moves = self.ways[what].known.moves.get(piece, ())
        return [each for each in moves if each.source != self._rank == each.target]

    def _send(self, what: Cargo, rows: Tensor, move: RowMove) -> None:
        with self._span("send", what, rows, move.piece, target=move.target):
            work = dist.isend(rows, dst=move.target, group=self._groups[what])
        microbatch = self.ways[what].known.microbatches.get(move.piece, 0)
        self.sends[what].add(work, rows, microbatch=microbatch)

    def _post(self, what: Cargo) -> None:
        way = self.ways[what]
        while way.to_post and len(way.under_way) < self.windows[what]:
            piece = way.to_post.popleft()
            coming = way.under_way[piece] = []
            for move in self._come(what, piece):
                if count := size(move.placed):
                    rows = self.empty(what, count)
                    work = dist.irecv(rows, src=move.source, group=self._groups[what])
                    assert work is not None, "this rank is in the group"
                    coming.append((move, rows, work))

    def empty(self, what: Cargo, rows: int) -> Tensor:
        """[rows, width], as this rank takes them."""
        known = self.ways[what].known
        return torch.empty(rows, known.width, dtype=known.dtype, device=self._device)

    def _span(self, verb: str, what: Cargo, rows: Tensor, piece: int, **side: int) -> Span:
        microbatches = self.ways[what].known.microbatches
        if piece in microbatches:
            side["microbatch"] = microbatches[piece]
        return self._recorder.span("exchange", f"{verb} {what.said}", bytes=rows.nbytes, **side)


class _Sent(NamedTuple):
    """A message under way, and what must not change until it has gone."""

    work: dist.Work
    tensor: Tensor
    microbatch: int


class Sends:
    """Messages from this rank that are under way, of ``most`` microbatches at a time.

    Who sends goes on at once, until messages of ``most`` microbatches have not gone: then it waits
    for those of the oldest. That holds a rank back whose encoder has no gradients to wait for, and
    bounds what is kept for its receivers. Nobody hangs by that, as long as receivers come to
    microbatches in order and post a receive at the latest then.

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
        self._under_way.append(_Sent(work, tensor, microbatch))
        if self._under_way[0].microbatch > microbatch - self._most:
            return
        with self._recorder.span("exchange", self._name):
            while self._under_way[0].microbatch <= microbatch - self._most:
                _wait(self._under_way[0].work)
                self._under_way.popleft()

    def drain(self) -> None:
        """Wait, at the step's end, for all messages, or let the current stream do so."""
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
