"""Rows of a microbatch within a group of the decoder's: from ranks that hold some to those in need.

The group is a tensor parallel one, or that of all context parts, too, where ranks of these hold
rows that others need. With sequence parallelism, each rank needs the rows of its own chunk of the
sequence; without, the ranks of a tensor parallel group need the same. All get theirs in one
all-to-all, and each gradient goes back to who held the row in another. Where all need all rows,
those who hold some broadcast them; of the gradient each has a copy, so that nothing is shared on
the way back. All ranks know who holds and who needs what, and enter for each microbatch that has
rows at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.exchange import moved, own_storage, put_together, taken
from loongplug.hetero.routes import RowMove, Rows, size
from loongplug.observe.recorder import NOTHING, Recorder


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Of the rows of a microbatch, those that each of some ranks ``holds``, and that it ``needs``.

    Each row is held once, and needed by as many as each other one. ``ranks`` are those of the
    group, in its order.
    """

    ranks: tuple[int, ...]
    holds: tuple[Rows, ...]
    needs: tuple[Rows, ...]

    @property
    def rows(self) -> int:
        """How many are held."""
        return sum(map(size, self.holds))

    @property
    def copies(self) -> int:
        """How many ranks, neighbours, need each row."""
        return sum(map(size, self.needs)) // max(1, self.rows)

    def there(self, rank: int) -> Iterator[RowMove]:
        """The moves that ``rank`` is in, as those of piece 0."""
        for source, has in zip(self.ranks, self.holds, strict=True):
            for target, wants in zip(self.ranks, self.needs, strict=True):
                if rank in (source, target):
                    yield RowMove.of(0, source, target, has=has, wants=wants)

    def back(self, rank: int) -> Iterator[RowMove]:
        """Those of the gradient: of each row from one of its copies, the own one if there is."""
        copies = self.copies
        for number, (target, wants) in enumerate(zip(self.ranks, self.holds, strict=True)):
            for place in range(number % copies, len(self.ranks), copies):
                source, has = self.ranks[place], self.needs[place]
                if rank in (source, target):
                    yield RowMove.of(0, source, target, has=has, wants=wants)


class Dealer:
    """One rank's part of what a ``group`` deals."""

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
        if not deal.rows or len(self._ranks) == 1:
            return held
        if deal.copies < len(self._ranks):
            return self._exchanged(held, deal.there(self._rank))
        shared = (
            (rows, self.shared(held, rows=size(rows), source=source))
            for source, rows in zip(deal.ranks, deal.holds, strict=True)
            if rows
        )
        return put_together(shared, rows=deal.rows, like=held)

    def gradients(self, came: Tensor, deal: Deal) -> Tensor:
        """The gradient of what this rank needed to that of what it held.

        Collective: the group, but where each has a copy of all.
        """
        if not deal.rows or len(self._ranks) == 1:
            return came
        if deal.copies < len(self._ranks):
            return self._exchanged(came, deal.back(self._rank))
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

    def _exchanged(self, rows: Tensor, moves: Iterator[RowMove]) -> Tensor:
        """By one all-to-all, [rows, width]."""
        with self._recorder.span("exchange", "deal") as span:
            found, nbytes = moved({0: rows}, [*moves], like=rows[:0], group=self._group)
            span.note(bytes=nbytes)
        return found[0]
