"""Pieces in a step that streams: encoded, sent, and gone backward through."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from loongplug.data.microbatch import MediaInput, Microbatch, Share, Unit
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.operations import (
    EncodePieces,
    PiecesBackward,
    ReceiveGradient,
    SendFeatures,
)
from loongplug.hetero.piece_edges import PieceEdges
from loongplug.hetero.routes import Rows, common, within
from loongplug.hetero.stream import Stream
from loongplug.hetero.streamed_pieces import Piece, StepPlanner, StreamedStep


class Streaming:
    """What one rank streams the pieces of the encoder ``name`` by, for a run: plans and edges."""

    def __init__(
        self, planner: StepPlanner, edges: PieceEdges, *, name: str, replica: int, stage: int
    ) -> None:
        """``replica`` is the encoder's that this rank is of, ``stage`` the decoder's."""
        self._planner = planner
        self.name = name
        self.edges = edges
        self.replica = replica
        self.stage = stage

    def pieces(
        self, microbatches: Sequence[Microbatch], *, spec: ExchangeSpec, encoder: EncoderOfStep
    ) -> "PiecesOfStep | None":
        """Of a step of training with these ``microbatches``; None where it does not stream.

        ``spec`` is what all know of the whole units. The same on every rank of a model replica.
        """
        units = [each.units[self.name] for each in microbatches]
        planned = self._planner.plan([each.grids for each in units])
        if planned is None:
            return None
        assert encoder.trains == planned.trains, "counted from the flags that freeze"
        return PiecesOfStep(self, planned, units, spec=spec, encoder=encoder)


class PiecesOfStep:
    """One rank's pieces during one step."""

    def __init__(
        self,
        streaming: Streaming,
        planned: StreamedStep,
        units: Sequence[Unit],
        *,
        spec: ExchangeSpec,
        encoder: EncoderOfStep,
    ) -> None:
        """The step begins: receives of pieces are posted."""
        self._streaming = streaming
        self._planned = planned
        self._units = units
        self._encoder = encoder
        self._edges = streaming.edges
        self.stream: Stream = planned.stream(streaming.replica)
        self._spec = _of_pieces(planned.pieces, spec)
        self._payloads: dict[int, Tensor] = {}
        self._own: dict[tuple[int, ...], GradientEdge] = {}  # by the pieces of a pass
        self._gradients: dict[int, Tensor] = {}  # of payloads
        self._received: dict[int, int] = {}  # rows of each piece, where it is consumed
        self._edges.begin(self._spec, trains=encoder.trains)

    @property
    def forwards(self) -> list[bool]:
        """Of each pass of this rank's stage of the decoder, whether it is a forward."""
        return [each.forward for each in self._planned.passes[self._streaming.stage]]

    def end(self) -> None:
        """Behind the plan's last operation."""
        self._edges.drain()
        for what in (self._payloads, self._own, self._gradients, self._received):
            assert not what, f"nobody used what there is of pieces {list(what)}"

    def operate(
        self, operation: EncodePieces | SendFeatures | ReceiveGradient | PiecesBackward
    ) -> None:
        """One of those on a rank that encodes the pieces."""
        match operation:
            case EncodePieces(pieces=pieces):
                self._encode(pieces)
            case SendFeatures(piece=piece):
                self._edges.send_features(piece, self._payloads.pop(piece))
            case ReceiveGradient(piece=piece):
                self._gradients[piece] = self._edges.receive_gradient(piece)
            case PiecesBackward(pieces=pieces):
                first, *others = map(self._gradients.pop, pieces)
                gradient = torch.cat([first, *others]) if others else first
                # Whatever replica is through last, all reduce together.
                self._encoder.backward(self._own.pop(pieces), gradient, more=True)

    def receive(self, pieces: range) -> Tensor:
        """The features of a microbatch that this rank's decoder needs, [rows, width].

        They are in the order of the text, as pieces are, and rows within one.
        """
        found = [self._edges.receive_features(each) for each in pieces]
        if self._encoder.trains:
            self._received |= zip(pieces, map(len, found), strict=True)
        if len(found) == 1:
            return found[0]
        spec = self._spec
        nothing = torch.empty(0, spec.width, dtype=spec.dtype, device=self._edges.device)
        return torch.cat([nothing, *found])

    def give_back(self, pieces: range, gradient: Tensor) -> None:
        """The ``gradient`` of what :meth:`receive` gave, to who encoded it."""
        rows = [self._received.pop(each) for each in pieces]
        for each, part in zip(pieces, gradient.split(rows) if rows else (), strict=True):
            self._edges.send_gradient(each, part)

    def _encode(self, numbers: tuple[int, ...]) -> None:
        pieces = [self._planned.pieces[each] for each in numbers]
        unit, *joined = map(self._unit, pieces)
        payload = self._encoder.payload(unit, joined=joined)
        if self._encoder.trains:
            self._own[numbers] = get_gradient_edge(payload)
        parts = payload.detach().split([each.tokens for each in pieces])
        if joined:  # a view of one piece would keep the memory of all
            parts = tuple(each.clone() for each in parts)
        self._payloads |= zip(numbers, parts, strict=True)

    def _unit(self, piece: Piece) -> Unit:
        """The piece's media alone, of those of its unit that are here."""
        unit = self._units[piece.microbatch]
        return replace(unit, media=self._media(piece, unit))

    def _media(self, piece: Piece, unit: Unit) -> MediaInput:
        """A piece's, of those of the replica's share; neighbours there, too."""
        assert unit.media is not None, "the unit was loaded somewhere else"
        share: Share
        (share,) = (x for x in unit.shares if x.encoder_replica == self._streaming.replica)
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


def _of_pieces(pieces: Sequence[Piece], units: ExchangeSpec) -> ExchangeSpec:
    """What all know of the pieces, of what they know of the units."""
    shards = None
    if units.shards is not None:
        shards = tuple(
            tuple(_rows_of(each, rows) for rows in units.shards[each.microbatch]) for each in pieces
        )
    return ExchangeSpec(
        tokens=tuple(each.tokens for each in pieces),
        shares=tuple((Share(encoder_replica=each.replica),) for each in pieces),
        width=units.width,
        dtype=units.dtype,
        shards=shards,
    )


def _rows_of(piece: Piece, needed: Rows) -> Rows:
    """What of a piece's rows is among those ``needed`` of its unit."""
    own = (piece.rows,)
    return within(common(needed, own), own)
