"""What carries an encoder's pieces from rank to rank: a wire, and groups that deal.

What goes over the wire are features and their gradients, and between the stages of an encoder on
ranks of its own its states and theirs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.bubble_planner import StreamedStep
from loongplug.hetero.exchange import moved, own_storage
from loongplug.hetero.operations import Cargo
from loongplug.hetero.piece_routes import Crossings, Deal, StageLinks, state_moves
from loongplug.hetero.row_moves import ExchangeSpec, RowMove, size
from loongplug.hetero.wire import Wire
from loongplug.observe.recorder import NOTHING, Recorder


class Dealer:
    """One rank's part of what a ``group`` deals of a microbatch.

    All get theirs in one all-to-all, and each gradient goes back to who held the row in another.
    All ranks know who holds and who needs what, and enter for each microbatch that has rows at all.
    """

    def __init__(self, group: dist.ProcessGroup, *, recorder: Recorder = NOTHING) -> None:
        self._group = group
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank()
        self._recorder = recorder

    def features(self, held: Tensor, deal: Deal) -> Tensor:
        """Features that this rank needs [rows, width], of those ``held``. Collective: the group."""
        assert deal.ranks == self._ranks, (deal, self._ranks)
        mine = deal.holds[self._ranks.index(self._rank)]
        assert len(held) == size(mine), (held.shape, deal, self._rank)
        return self._exchanged(held, deal, deal.there)

    def gradients(self, came: Tensor, deal: Deal) -> Tensor:
        """The gradient of what this rank needed to that of what it held. Collective: the group."""
        return self._exchanged(came, deal, deal.back)

    def shared(self, held: Tensor, *, rows: int, source: int) -> Tensor:
        """What the ``source`` alone holds, [rows, width]. Collective: the group."""
        if not rows or len(self._ranks) == 1:
            return held
        here = source == self._rank
        found = held.contiguous() if here else held.new_empty(rows, held.shape[1])
        with self._recorder.span("exchange", "deal", bytes=found.nbytes if here else 0):
            dist.broadcast(found, src=source, group=self._group)
        return found

    def _exchanged(
        self, rows: Tensor, deal: Deal, way: Callable[[int], Iterator[RowMove]]
    ) -> Tensor:
        if not deal.rows or len(self._ranks) == 1:
            return rows
        moves = [*way(self._rank)]
        with self._recorder.span("exchange", "deal") as span:
            found, nbytes = moved({0: rows}, moves, like=rows[:0], group=self._group)
            span.note(bytes=nbytes)
        return own_storage(found[0])


@dataclass(kw_only=True)
class Carrier:
    """The ends of one rank for all pieces that are sent in a run.

    ``deals`` is of the decoder's group that deals, None on ranks of no decoder; ``shares`` of the
    encoder replica's, None on ranks that make no features. ``crossings`` gives those of a
    step's units, by whether it is one of training and what streams in it; None where its pieces do
    not go from rank to rank. ``links`` are to other stages of an encoder on ranks of its own.
    """

    wire: Wire
    deals: Dealer | None
    shares: Dealer | None
    crossings: Callable[[ExchangeSpec, bool, StreamedStep | None], Crossings | None]
    links: StageLinks = MappingProxyType({})
    _now: Crossings = field(init=False, repr=False)
    _deals: dict[int, Deal] = field(default_factory=dict, init=False)  # by microbatch

    def begin(
        self, crossings: Crossings, *, states: Sequence[tuple[int, int]] = (), trains: bool
    ) -> None:
        """A step begins: ``states`` go to other stages; ``trains``: gradients come back."""
        self._now = crossings
        self._deals.clear()  # those of steps without gradients
        moves = {what: crossings.of_step(what) for what in (Cargo.FEATURES, Cargo.GRADIENTS)}
        if self.links:
            rank, dtype = crossings.rank, crossings.units.dtype
            moves |= {
                what: state_moves(what, states, self.links, rank=rank, dtype=dtype)
                for what in (Cargo.STATES, Cargo.STATE_GRADIENTS)
            }
        self.wire.begin({what: each for what, each in moves.items() if trains or not what.back})

    def dealt(self, microbatch: int, came: list[Tensor]) -> Tensor:
        """What this rank's decoder needs, [rows, width], of what came of pieces, here or elsewhere.

        ``came`` is empty behind that: the memory of pieces that are joined is let go.
        """
        assert self.deals is not None, "this rank decodes"
        if len(came) != 1:
            came[:] = [torch.cat([self.wire.empty(Cargo.FEATURES, 0), *came])]
        held = came.pop()
        deal = self._deals[microbatch] = self._now.deal(microbatch)
        return self.deals.features(held, deal)

    def collected(self, microbatch: int, pieces: Sequence[int], came: Tensor) -> list[Tensor]:
        """The gradient of what has come here of each piece, of what the decoder has made."""
        assert self.deals is not None, "this rank decodes"
        held = self.deals.gradients(came, self._deals.pop(microbatch))
        return list(held.split([self.wire.rows(Cargo.GRADIENTS, piece) for piece in pieces]))

    def shared(self, pieces: Sequence[int], came: Tensor) -> Tensor:
        """The gradient of what one pass has made, [rows, width], of which one rank has it all."""
        if self.shares is None or not pieces:
            return came
        crossings = [each for each in self._now.every if each.piece in pieces]
        rows = sum(each.rows.stop - each.rows.start for each in crossings)
        return self.shares.shared(came, rows=rows, source=crossings[0].meetings[0][0])
