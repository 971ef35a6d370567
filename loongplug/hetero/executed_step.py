"""What one step has made of an encoder's pieces on a rank, and not used up yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from loongplug.data.microbatch import MediaInput, Share, Unit
from loongplug.hetero.bubble_planner import Piece, StepPlanner, StreamedStep
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.encoder_state import addresses
from loongplug.hetero.exchange import AllToAll, ExchangeSpec
from loongplug.hetero.operations import Cargo, StepPlan
from loongplug.hetero.wire import Wire
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform.prefetch import Movable


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """What one rank streams an encoder's pieces by, for a run.

    ``replica`` is the encoder's that this rank is of, ``stage`` the decoder's.
    """

    planner: StepPlanner
    wire: Wire[ExchangeSpec]
    replica: int
    stage: int

    def media(self, piece: Piece, unit: Unit) -> MediaInput:
        """A piece's alone, of those of its unit that are here: neighbours in the share, too."""
        assert unit.media is not None, "the unit was loaded somewhere else"
        share: Share
        (share,) = (x for x in unit.shares if x.encoder_replica == self.replica)
        held = range(len(unit.grids)) if share.media is None else share.media
        first = held.index(piece.media.start)
        behind = first + len(piece.media)
        assert tuple(held[first:behind]) == tuple(piece.media), (held, piece)
        sizes = [prod(unit.grids[medium]) for medium in held[:behind]]
        before = sum(sizes[:first])
        return MediaInput(
            rows=unit.media.rows[before : before + sum(sizes[first:])],
            grids=unit.media.grids[first:behind],
        )


@dataclass(kw_only=True)
class ExecutedStep:
    """What one step has made and not used up, by piece; ``own`` is what this rank encoded.

    Where it streams, ``streamed`` is what is planned of it, and ``pieces`` are the numbers of each
    microbatch's; else a piece is a unit, of which there is one to a microbatch.
    """

    plan: StepPlan
    encoder: EncoderOfStep
    exchange: AllToAll | Wire[ExchangeSpec]
    model: MultimodalModel
    units: Sequence[Unit]
    spec: ExchangeSpec  # of all that is exchanged
    pieces: Sequence[range] | None = None
    streaming: Streaming | None = None
    streamed: StreamedStep | None = None
    wires: dict[Cargo, Wire[Any]] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)  # of the stage before
    payloads: dict[int, Tensor] = field(default_factory=dict)  # encoded here, not gathered yet
    features: dict[int, Tensor] = field(default_factory=dict)  # gathered here
    taken: dict[int, Tensor] = field(default_factory=dict)  # for a microbatch's forward under way
    lengths: dict[int, list[int]] = field(default_factory=dict)  # rows of a microbatch's pieces
    arrived: Tensor | None = None  # the gradient that the backward under way has made
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of features
    # Roots of graphs alone: of what is encoded, features are held where they are consumed.
    own: dict[tuple[int, ...], GradientEdge] = field(default_factory=dict)  # by pass
    own_gradients: dict[int | None, Tensor] = field(default_factory=dict)  # None: of no media
    saved: dict[int, list[Movable]] = field(default_factory=dict)  # that may leave, by pass

    def unit(self, number: int) -> Unit:
        """The media of a piece that is encoded here."""
        if self.streamed is None or self.streaming is None:
            return self.units[number]
        piece = self.streamed.pieces[number]
        unit = self.units[piece.microbatch]
        return replace(unit, media=self.streaming.media(piece, unit))

    def pieces_of(self, microbatch: int) -> range:
        """Those that a microbatch consists of."""
        return range(microbatch, microbatch + 1) if self.pieces is None else self.pieces[microbatch]

    @cached_property
    def stays(self) -> set[int]:
        """Addresses of what others hold: the weights, and what is encoded here."""
        media = (each.media.rows for each in self.units if each.media is not None)
        return addresses((*self.model.parameters(), *media))

    def assert_done(self) -> None:
        """Behind the last operation: all that was made is used up."""
        for what in (
            *(self.payloads, self.features, self.taken, self.lengths, self.gradients),
            *(self.own, self.own_gradients, self.saved, self.states),
        ):
            assert not what, f"nobody used what there is of pieces {list(what)}"
