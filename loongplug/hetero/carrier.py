"""What carries an encoder's rows from rank to rank: a wire, and groups that deal.

What goes over the wire are features and their gradients, and between the stages of an encoder on
ranks of its own its states and theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from loongplug.hetero.bubble_planner import StreamedStep
from loongplug.hetero.crossings import Crossings
from loongplug.hetero.dealing import Deal, Dealer
from loongplug.hetero.operations import Cargo
from loongplug.hetero.routes import ExchangeSpec, RowMove
from loongplug.hetero.wire import StepMoves, Wire
from loongplug.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class StageLink:
    """From a rank to the one of the next stage with its tensor and data parallel coordinates.

    ``width`` is that of what is handed on.
    """

    source: int
    target: int
    width: int


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """What stages know of the units of a step: ``rows`` of states, and of which microbatch each."""

    rows: tuple[int, ...]
    microbatches: tuple[int, ...]
    dtype: torch.dtype


def stage_links(layout: Layout, rank: int, *, widths: Sequence[int]) -> tuple[StageLink, ...]:
    """A rank's from the stage before and to the one behind its own, where there are such.

    ``widths`` are those of what each stage of ``layout`` but the last hands on.
    """
    pipeline = layout.group("pp", rank) if rank in layout.ranks else []
    return tuple(
        StageLink(source=source, target=target, width=width)
        for (source, target), width in zip(pairwise(pipeline), widths, strict=False)
        if rank in (source, target)
    )


def state_moves(
    what: Cargo, spec: StageSpec, links: Sequence[StageLink], *, rank: int
) -> StepMoves:
    """What a stage gives and takes of a step's units."""
    moves = {
        unit: [
            RowMove(unit, each.source, each.target, (slice(0, rows),), (slice(0, rows),))
            for each in links
        ]
        for unit, rows in enumerate(spec.rows)
    }
    if what.back:
        moves = {unit: [move.back for move in own] for unit, own in moves.items()}
    taken = [x.width for x in links if rank == (x.source if what.back else x.target)]
    return StepMoves(
        moves=moves,
        microbatches=dict(enumerate(spec.microbatches)),
        width=sum(taken),  # of the one link, if there is one
        dtype=spec.dtype,
    )


@dataclass(kw_only=True)
class Carrier:
    """One rank's, for a run.

    ``deals`` is of the decoder's group that deals, None on ranks of no decoder; ``shares`` of the
    encoder replica's, None on ranks that make no features. ``crossings`` gives those of a
    step's units, by whether it is one of training and what streams in it; None where its pieces do
    not go from rank to rank. ``links`` are to other stages of an encoder on ranks of its own.
    """

    wire: Wire
    deals: Dealer | None
    shares: Dealer | None
    crossings: Callable[[ExchangeSpec, bool, StreamedStep | None], Crossings | None]
    links: tuple[StageLink, ...] = ()
    _now: Crossings = field(init=False, repr=False)
    _deals: dict[int, Deal] = field(default_factory=dict, init=False)  # by microbatch

    def begin(self, crossings: Crossings, states: StageSpec | None, *, trains: bool) -> None:
        """A step begins: ``states`` go to other stages; ``trains``: gradients come back."""
        self._now = crossings
        self._deals.clear()  # those of steps without gradients
        moves = {what: crossings.of_step(what) for what in (Cargo.FEATURES, Cargo.GRADIENTS)}
        if states is not None:
            moves |= {
                what: state_moves(what, states, self.links, rank=crossings.rank)
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
