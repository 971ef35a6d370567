"""What carries an encoder's pieces from rank to rank: a wire, and tensor parallel groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from loongplug.hetero.crossings import Crossings
from loongplug.hetero.dealing import Dealer
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.operations import Cargo
from loongplug.hetero.stage_links import StageLink, StageSpec, stage_ends
from loongplug.hetero.wire import Wire


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

    def begin(self, crossings: Crossings, states: StageSpec | None, *, trains: bool) -> None:
        """A step begins: ``states`` go to other stages; ``trains``: gradients come back."""
        self._now = crossings
        ends = {what: crossings.ends(what) for what in (Cargo.FEATURES, Cargo.GRADIENTS)}
        if states is not None:
            ends |= {
                what: stage_ends(what, states, before=self.before, behind=self.behind)
                for what in (Cargo.STATES, Cargo.STATE_GRADIENTS)
            }
        self.wire.begin({what: each for what, each in ends.items() if trains or not what.back})

    def dealt(self, microbatch: int, held: Tensor) -> Tensor:
        """What this rank's decoder needs, [rows, width], of what has come here and elsewhere."""
        assert self.deals is not None, "this rank decodes"
        return self.deals.features(held, self._now.deal(microbatch))

    def collected(self, microbatch: int, pieces: Sequence[int], came: Tensor) -> list[Tensor]:
        """The gradient of what has come here of each piece, of what the decoder has made."""
        assert self.deals is not None, "this rank decodes"
        held = self.deals.gradients(came, self._now.deal(microbatch))
        rows = [self.wire.rows(Cargo.GRADIENTS, piece) for piece in pieces]
        return list(held.split(rows)) if rows[1:] else [held] * len(rows)

    def shared(self, pieces: Sequence[int], came: Tensor) -> Tensor:
        """The gradient of what one pass has made, [rows, width], of which one rank has it all."""
        if self.shares is None or not pieces:
            return came
        crossings = [each for each in self._now.every if each.piece in pieces]
        rows = sum(each.rows.stop - each.rows.start for each in crossings)
        return self.shares.shared(came, rows=rows, source=crossings[0].meetings[0][0])
