"""Rows of a microbatch within a tensor parallel group: from ranks that hold some to those in need.

With sequence parallelism, each rank needs the rows of its own chunk of the sequence, and all get
them in one all-to-all; their gradients go back in another. Without, each needs all rows, and who
holds some broadcasts them; of the gradient each has a copy, so that nothing is shared on the way
back. All ranks know who holds and who needs what, and enter for each microbatch that has rows at
all.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.exchange import moved, own_storage, put_together, taken
from loongplug.hetero.routes import RowMove, Rows, size
from loongplug.observe.recorder import NOTHING, Recorder


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Of the rows of a microbatch, those that each of some ranks ``holds``, and that it ``needs``.

    Each row is held once. ``ranks`` are those of the group, in its order.
    """

    ranks: tuple[int, ...]
    holds: tuple[Rows, ...]
    needs: tuple[Rows, ...]

    @property
    def rows(self) -> int:
        """How many are held."""
        return sum(map(size, self.holds))

    @property
    def chunked(self) -> bool:
        """Whether each row is needed once, too; else all ranks need all."""
        return sum(map(size, self.needs)) == self.rows

    @property
    def back(self) -> "Deal":
        """The way back of one that is chunked."""
        return Deal(ranks=self.ranks, holds=self.needs, needs=self.holds)


class Dealer:
    """One rank's part of what a tensor parallel ``group`` deals."""

    def __init__(self, group: dist.ProcessGroup, *, recorder: Recorder = NOTHING) -> None:
        self._group = group
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank()
        self._recorder = recorder

    def features(self, held: Tensor, deal: Deal) -> Tensor:
        """What this rank holds [rows, width] to what it needs. Collective: the group."""
        assert deal.ranks == self._ranks, (deal, self._ranks)
        mine = deal.holds[self._ranks.index(self._rank)]
        assert len(held) == size(mine), (held.shape, deal, self._rank)
        if deal.chunked:
            return self._exchanged(held, deal)
        shared = (
            (rows, self.shared(held, rows=size(rows), source=source))
            for source, rows in zip(deal.ranks, deal.holds, strict=True)
            if rows
        )
        return put_together(shared, rows=deal.rows, like=held)

    def gradients(self, came: Tensor, deal: Deal) -> Tensor:
        """The gradient of what this rank needed to that of what it held.

        Collective: the group, where each rank has needed a chunk. Else each has all of it.
        """
        if deal.chunked:
            return self._exchanged(came, deal.back)
        return own_storage(taken(came, deal.holds[self._ranks.index(self._rank)]))

    def shared(self, held: Tensor, *, rows: int, source: int) -> Tensor:
        """What the ``source`` alone holds, [rows, width]. Collective: the group."""
        if not rows or len(self._ranks) == 1:
            return held
        here = source == self._rank
        found = held.contiguous() if here else held.new_empty(rows, held.shape[1])
        with self._recorder.span("exchange", "deal", bytes=found.nbytes if here else 0):
            dist.broadcast(found, src=source, group=self._group)
        return found

    def _exchanged(self, rows: Tensor, deal: Deal) -> Tensor:
        """From what each rank holds to what it needs, [rows, width]; one all-to-all."""
        if not deal.rows or len(self._ranks) == 1:
            return rows
        moves = [
            RowMove.of(0, source, target, has=has, wants=wants)
            for source, has in zip(deal.ranks, deal.holds, strict=True)
            for target, wants in zip(deal.ranks, deal.needs, strict=True)
            if self._rank in (source, target)
        ]
        with self._recorder.span("exchange", "deal") as span:
            found, nbytes = moved({0: rows}, moves, like=rows[:0], group=self._group)
            span.note(bytes=nbytes)
        return found[0]
