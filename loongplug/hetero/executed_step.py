"""What one step has made of an encoder's pieces on a rank, and what of that is on the host."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from loongplug.data.microbatch import MediaToCome, Share, Unit
from loongplug.hetero.bubble_planner import Piece, StepPlanner, StreamedStep
from loongplug.hetero.carrier import Carrier
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.encoder_state import EncoderState, addresses, movable_saves
from loongplug.hetero.operations import Kept, StepPlan, To
from loongplug.hetero.routes import ExchangeSpec
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform import Platform
from loongplug.platform.prefetch import Movable, PrefetchQueue


class Streaming(NamedTuple):
    """What steps of training stream by, on a rank of this encoder replica and decoder stage."""

    planner: StepPlanner
    replica: int
    stage: int


def media_of(piece: Piece, unit: Unit) -> MediaToCome:
    """A piece's alone, of those of its unit that are here: neighbours in the share, too."""
    assert isinstance(unit.media, MediaToCome), "the unit was loaded somewhere else"
    share: Share
    (share,) = (x for x in unit.shares if x.encoder_replica == piece.replica)
    held = range(len(unit.grids)) if share.media is None else share.media
    first = held.index(piece.media.start)
    here = range(first, first + len(piece.media))
    assert tuple(held[here.start : here.stop]) == tuple(piece.media), (held, piece)
    return unit.media.part(here)


@dataclass(kw_only=True)
class ExecutedStep:
    """What one step has made and not used up, by piece; ``own`` is what this rank encoded.

    Where it streams, ``streamed`` is what is planned of it, and ``pieces`` are the numbers of each
    microbatch's; else a piece is a unit, of which there is one to a microbatch.
    """

    plan: StepPlan
    encoder: EncoderOfStep
    model: MultimodalModel
    units: Sequence[Unit]
    spec: ExchangeSpec  # of all that is exchanged
    pieces: Sequence[range] | None = None
    streamed: StreamedStep | None = None
    carrier: Carrier | None = None  # where pieces go from rank to rank
    states: dict[int, Tensor] = field(default_factory=dict)  # of the stage before
    payloads: dict[int, Tensor] = field(default_factory=dict)  # encoded here, not gathered yet
    features: dict[int, Tensor] = field(default_factory=dict)  # gathered here
    taken: dict[int, Tensor] = field(default_factory=dict)  # for a microbatch's forward under way
    arrived: Tensor | None = None  # the gradient that the backward under way has made
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of features
    # Roots of graphs alone: of what is encoded, features are held where they are consumed.
    own: dict[tuple[int, ...], GradientEdge] = field(default_factory=dict)  # by pass
    own_gradients: dict[int | None, Tensor] = field(default_factory=dict)  # None: of no media
    saved: dict[int, list[Movable]] = field(default_factory=dict)  # that may leave, by pass

    def unit(self, number: int) -> Unit:
        """The media of a piece that is encoded here."""
        if self.streamed is None:
            return self.units[number]
        piece = self.streamed.pieces[number]
        unit = self.units[piece.microbatch]
        return replace(unit, media=media_of(piece, unit))

    def pieces_of(self, microbatch: int) -> range:
        """Those that a microbatch consists of."""
        return range(microbatch, microbatch + 1) if self.pieces is None else self.pieces[microbatch]

    def rows_of(self, what: Kept) -> dict[int, Tensor] | None:
        """The rows of this kind by piece; None of a kind that is not rows of pieces."""
        return {Kept.FEATURES: self.features, Kept.GRADIENTS: self.gradients}.get(what)

    @cached_property
    def stays(self) -> set[int]:
        """Addresses of what others hold: the weights."""
        return addresses(self.model.parameters())

    def assert_done(self) -> None:
        """Behind the last operation: all that was made is used up."""
        for what in (
            *(self.payloads, self.features, self.taken, self.gradients),
            *(self.own, self.own_gradients, self.saved, self.states),
        ):
            assert not what, f"nobody used what there is of pieces {list(what)}"


class HostMoves:
    """One rank's, for one encoder and a run: the queue of all that moves."""

    def __init__(self, platform: Platform) -> None:
        self._device = platform.device
        self.queue = PrefetchQueue(platform.copies())
        self.state: EncoderState | None = None  # where it leaves for the host

    def saves(
        self, step: ExecutedStep, *, movable: bool
    ) -> AbstractContextManager[dict[int, Movable] | None]:
        """Inside, something is encoded; what its backward needs is given where it is ``movable``.

        Weights are not among that.
        """
        if not movable:
            return nullcontext()
        return movable_saves(device=self._device, stays=step.stays)

    def move(self, to: To, what: Kept, pieces: Sequence[int], step: ExecutedStep) -> None:
        """What leaves is the ``step``'s, and what comes back is it again."""
        names: list[tuple[Kept, int | None]] = [(what, piece) for piece in pieces or (None,)]
        match to:
            case To.LEAVE:
                self.queue.leave({name: self._leaving(*name, step) for name in names})
            case To.FREE:
                self.queue.let_go(*names)
            case To.RETURN:
                self.queue.send_for(*names)
            case To.HERE:
                taken = self.queue.take(*names)
                if (rows := step.rows_of(what)) is not None:
                    for piece in pieces:
                        (found,) = taken[what, piece]
                        assert found.device is not None
                        rows[piece] = found.device

    def _leaving(self, what: Kept, piece: int | None, step: ExecutedStep) -> Sequence[Movable]:
        if piece is None:
            assert self.state is not None, "the encoder's state alone is of no piece"
            return self.state.movable()
        rows = step.rows_of(what)
        if rows is None:
            return step.saved.pop(piece)
        return [Movable(device=rows.pop(piece), where=self._device)]
