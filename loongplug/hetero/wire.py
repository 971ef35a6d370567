"""Rows of pieces between ranks, point to point: one way for each kind of rows.

Both ends of a message know from the text how many rows it has, and come to pieces in one order. So
nothing is announced, and a message without rows is left out on both sides. With NCCL, two ranks
have one queue for all that they send each other in a process group. So each kind of rows has a
group of its own: what goes there and what comes back would wait for one another. Two ranks send
each other a kind one way alone.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.exchange import own_storage, put_together, taken
from loongplug.hetero.operations import Cargo
from loongplug.hetero.routes import RowMove, size
from loongplug.hetero.sends import Sends
from loongplug.observe.recorder import NOTHING, Recorder, Span

# Pieces whose features or states are received ahead of the one that is waited for; of gradients it
# is one. Where a GPU has one queue for all its work, more would hold up what others need to go on.
WINDOW = 2


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
    """One kind of rows on one rank in a step, and where they are. All by piece."""

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
        """How many this rank gives of a piece."""
        return sum(size(move.given) for move in self._given(what, piece))

    def drain(self) -> None:
        """At the step's end: wait for what is still being sent."""
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
        """From other ranks."""
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
