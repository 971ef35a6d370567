"""What carries an encoder's rows from rank to rank: a wire, and tensor parallel groups.

What goes over the wire are features and their gradients, and between the stages of an encoder on
ranks of its own its states and theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loongplug.hetero.crossings import Crossings
from loongplug.hetero.dealing import Deal, Dealer
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.operations import Cargo
from loongplug.hetero.wire import Ends, PieceEnd, PieceMessage, Wire
from loongplug.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class StageLink:
    """The rank of a neighbouring stage that this one exchanges with.

    It has this rank's tensor and data parallel coordinates. ``width`` is that of a payload.
    """

    peer: int
    width: int


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """What stages know of the units of a step: ``rows`` of states, and of which microbatch each."""

    rows: tuple[int, ...]
    microbatches: tuple[int, ...]
    dtype: torch.dtype


def stage_links(
    layout: Layout, rank: int, *, widths: Sequence[int]
) -> tuple[StageLink | None, StageLink | None]:
    """A rank's to the stages before and behind its own, where there are such.

    ``widths`` are those of what each stage of ``layout`` but the last hands on.
    """
    if rank not in layout.ranks:
        return None, None
    stage, pipeline = layout.coordinates(rank).pp, layout.group("pp", rank)
    before = StageLink(peer=pipeline[stage - 1], width=widths[stage - 1]) if stage else None
    if stage == layout.pp - 1:
        return before, None
    return before, StageLink(peer=pipeline[stage + 1], width=widths[stage])


def stage_ends(
    what: Cargo, spec: StageSpec, *, before: StageLink | None, behind: StageLink | None
) -> Ends:
    """What a stage gives and takes of a step's units."""

    def of(link: StageLink | None) -> dict[int, PieceEnd]:
        numbered = enumerate(zip(spec.rows, spec.microbatches, strict=True))
        return {
            unit: PieceEnd(
                messages=(PieceMessage(peer=link.peer, rows=(slice(0, rows),)),),
                microbatch=microbatch,
            )
            for unit, (rows, microbatch) in numbered
            if link is not None
        }

    giver, taker = (behind, before) if what.back else (before, behind)
    width = 0 if giver is None else giver.width
    return Ends(given=of(taker), taken=of(giver), width=width, dtype=spec.dtype)


@dataclass(kw_only=True)
class Carrier:
    """One rank's, for a run.

    ``deals`` is of the decoder's tensor parallel group, None on ranks of no decoder; ``shares`` of
    the encoder replica's, None on ranks that make no features. Where the encoder lies on ranks of
    its own, ``apart`` has the crossings of a step's units, by whether it is one of training;
    ``before`` and ``behind`` are links to its other stages.
    """

    wire: Wire
    deals: Dealer | None
    shares: Dealer | None
    apart: Callable[[ExchangeSpec, bool], Crossings] | None = None
    before: StageLink | None = None
    behind: StageLink | None = None
    _now: Crossings = field(init=False, repr=False)
    _deals: dict[int, Deal] = field(default_factory=dict, init=False)  # by microbatch

    def begin(self, crossings: Crossings, states: StageSpec | None, *, trains: bool) -> None:
        """A step begins: ``states`` go to other stages; ``trains``: gradients come back."""
        self._now = crossings
        self._deals.clear()  # those of steps without gradients
        ends = {what: crossings.ends(what) for what in (Cargo.FEATURES, Cargo.GRADIENTS)}
        if states is not None:
            ends |= {
                what: stage_ends(what, states, before=self.before, behind=self.behind)
                for what in (Cargo.STATES, Cargo.STATE_GRADIENTS)
            }
        self.wire.begin({what: each for what, each in ends.items() if trains or not what.back})

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
