"""Pieces of a step that streams: their media on a rank, and what all ranks know of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch.distributed as dist

from loongplug.data.microbatch import MediaInput, Microbatch, Share, Unit
from loongplug.hetero.crossings import Crossings, streamed_crossings
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.placement import Edge
from loongplug.hetero.stream import Stream
from loongplug.hetero.streamed_pieces import Piece, StepPlanner, StreamedStep


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """What one rank streams an encoder's pieces by, for a run.

    ``edge`` is the encoder's, to a decoder with so many context parts. ``replica`` is the encoder's
    that this rank is of, ``stage`` the decoder's.
    """

    planner: StepPlanner
    edge: Edge
    cp: int
    replica: int
    stage: int

    def pieces(
        self, microbatches: Sequence[Microbatch], *, spec: ExchangeSpec, encoder: EncoderOfStep
    ) -> "PiecesOfStep | None":
        """Of a step of training with these ``microbatches``; None where it does not stream.

        ``spec`` is what all know of the whole units. The same on every rank of a model replica.
        """
        units = [each.units[encoder.name] for each in microbatches]
        planned = self.planner.plan([each.grids for each in units])
        if planned is None:
            return None
        assert encoder.trains == planned.trains, "counted from the flags that freeze"
        crossings = streamed_crossings(
            planned.pieces, spec, edge=self.edge, cp=self.cp, rank=dist.get_rank()
        )
        return PiecesOfStep(self, planned, units, crossings=crossings)


class PiecesOfStep:
    """One rank's pieces during one step."""

    def __init__(
        self,
        streaming: Streaming,
        planned: StreamedStep,
        units: Sequence[Unit],
        *,
        crossings: Crossings,
    ) -> None:
        self._streaming = streaming
        self._planned = planned
        self._units = units
        self.stream: Stream = planned.stream(streaming.replica)
        self.crossings = crossings

    @property
    def forwards(self) -> list[bool]:
        """Of each pass of this rank's stage of the decoder, whether it is a forward."""
        return [each.forward for each in self._planned.passes[self._streaming.stage]]

    def unit(self, number: int) -> Unit:
        """A piece's media alone, of those of its unit that are here."""
        piece = self._planned.pieces[number]
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
