"""One step of an encoder on a rank: what there is of its pieces, and what operations do with it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from loongplug.data.microbatch import MediaToCome, Share, Unit
from loongplug.hetero.bubble_planner import Piece, StepPlanner, StreamedStep
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.encoder_state import EncoderState, addresses, movable_saves
from loongplug.hetero.exchange import AllToAll, own_storage
from loongplug.hetero.operations import (
    Backward,
    Cargo,
    Encode,
    Exchange,
    Hand,
    Kept,
    Move,
    Operation,
    Receive,
    Send,
    StepPlan,
    To,
    Weights,
)
from loongplug.hetero.piece_carrier import Carrier
from loongplug.hetero.row_moves import ExchangeSpec
from loongplug.hetero.wire import Wire
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform.platforms import Platform
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
    exchange: AllToAll | None
    carrier: Carrier | None  # where pieces go from rank to rank
    host: "HostMoves"
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

    def operate(self, operation: Operation) -> None:
        match operation:
            case Encode(pieces=pieces, movable=movable):
                self._encode(pieces, movable=movable)
            case Backward(pieces=pieces, more=more):
                self._backward(pieces, more=more)
            case Send(what=Cargo.STATE_GRADIENTS as what, piece=piece):
                states = self.states.pop(piece)
                if len(states):  # else they have no gradient
                    assert states.grad is not None, f"piece {piece} has no gradient"
                    self._wire.send(what, piece, states.grad)
            case Send(what=what, piece=piece):
                leaving = self.gradients if what is Cargo.GRADIENTS else self.payloads
                self._wire.send(what, piece, leaving.pop(piece))
            case Receive(what=what, piece=piece):
                coming = {Cargo.FEATURES: self.features, Cargo.STATES: self.states}
                coming.get(what, self.own_gradients)[piece] = self._wire.receive(what, piece)
            case Exchange(what=Cargo.FEATURES, pieces=pieces, to_host=to_host):
                self._gather(pieces, to_host=to_host)
            case Exchange(pieces=pieces):
                self._scatter(pieces)
            case Hand(what=Cargo.FEATURES, microbatch=microbatch):
                self._features_to_decoder(microbatch)
            case Hand(microbatch=microbatch):
                self._gradient_of_decoder(microbatch)
            case Move(to=to, what=what, pieces=pieces):
                self.host.move(to, what, pieces, self)
            case Weights(gather=True):
                self.encoder.gather_weights()
            case Weights():
                self.encoder.reduce_gradients()

    def _encode(self, pieces: tuple[int, ...], *, movable: bool) -> None:
        units = list(map(self.unit, pieces))
        moves: AbstractContextManager[dict[int, Movable] | None] = nullcontext()
        if movable:  # weights, which others hold, stay
            moves = movable_saves(device=self.host.device, stays=self.stays)
        with moves as saved:
            payload = self.encoder.payload(units, states=self._given(pieces))
        if saved is not None:
            self.saved[pieces[0]] = list(saved.values())
        if self.encoder.trains:
            self.own[pieces] = get_gradient_edge(payload)
        payload = payload.detach()
        if not pieces and self.encoder.trains:
            self.own_gradients[None] = torch.zeros_like(payload)  # [0, width]
        parts: Sequence[Tensor] = [payload] if pieces else []
        if len(pieces) > 1:
            parts = payload.split(list(map(self.encoder.tokens, units)))
            if self.streamed is not None:  # a view of one piece would keep the memory of all
                parts = [each.clone() for each in parts]
        self.payloads |= zip(pieces, parts, strict=True)

    def _backward(self, pieces: tuple[int, ...], *, more: bool) -> None:
        first, *others = map(self.own_gradients.pop, pieces or (None,))
        came = torch.cat([first, *others]) if others else first
        if self.carrier is not None:
            came = self.carrier.shared(pieces, came)
        self.encoder.backward(self.own.pop(pieces), came, more=more)

    def _given(self, pieces: tuple[int, ...]) -> Tensor | None:
        """What the stage before has made of a piece; held on to where it gets a gradient."""
        if not pieces or pieces[0] not in self.states:
            return None
        (piece,) = pieces
        return self.states[piece] if self.encoder.trains_before else self.states.pop(piece)

    def _features_to_decoder(self, microbatch: int) -> None:
        """Hand on features in the order of the text, which is that of pieces and of rows in one."""
        found = [self.features.pop(each) for each in self.pieces_of(microbatch)]
        if self.carrier is not None:
            found = [self.carrier.dealt(microbatch, found)]
        (self.taken[microbatch],) = found

    def _gradient_of_decoder(self, microbatch: int) -> None:
        pieces = self.pieces_of(microbatch)
        assert self.arrived is not None
        came, self.arrived = self.arrived, None
        parts = [came]
        if self.carrier is not None:
            parts = self.carrier.collected(microbatch, pieces, came)
        self.gradients |= zip(pieces, parts, strict=True)

    def _gather(self, pieces: range, *, to_host: bool) -> None:
        for some in self.spec.lots(pieces):
            own = [piece for piece in some if piece in self.payloads]
            arrived = self._all_to_all.gather_variable_shape_embeddings(
                {piece - some.start: self.payloads.pop(piece) for piece in own},
                self.spec.part(some),
            )
            here = [some.start + piece for piece in sorted(arrived)]
            for piece in here:
                rows = arrived.pop(piece - some.start)
                self.features[piece] = rows if to_host else own_storage(rows)
                del rows
            for to in (To.LEAVE, To.FREE) if to_host and here else ():
                self.host.move(to, Kept.FEATURES, here, self)

    def _scatter(self, pieces: range) -> None:
        exchange = self._all_to_all
        if exchange.consumes:
            missing = [piece for piece in pieces if piece not in self.gradients]
            assert not missing, f"no gradient came for pieces {missing}"
        found = exchange.scatter_variable_shape_embeddings(
            {
                piece - pieces.start: self.gradients.pop(piece)
                for piece in pieces
                if piece in self.gradients
            },
            self.spec.part(pieces),
        )
        self.own_gradients |= {pieces.start + piece: each for piece, each in found.items()}

    @property
    def _all_to_all(self) -> AllToAll:
        assert self.exchange is not None, "the encoder lies with the decoder"
        return self.exchange

    @property
    def _wire(self) -> Wire:
        assert self.carrier is not None, "the step exchanges"
        return self.carrier.wire


class HostMoves:
    """What one rank moves to the host and back for one encoder, in a queue, in a run."""

    def __init__(self, platform: Platform) -> None:
        self.device = platform.device
        self.queue = PrefetchQueue(platform.copies())
        self.state: EncoderState | None = None  # where it leaves for the host

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
        return [Movable(device=rows.pop(piece), where=self.device)]
