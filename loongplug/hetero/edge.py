"""Features from an encoder on ranks of its own to the decoder, and their gradients back."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import ApartEdge, ApartPiece
from loongplug.hetero.routes import common, size
from loongplug.hetero.wire import Ends, Over, PieceEnd, PieceMessage, Wire
from loongplug.observe.recorder import NOTHING, Recorder


@dataclass(frozen=True, kw_only=True)
class Transport:
    """The process groups of an encoder's edges.

    Each direction has a group of its own, with all ranks of all edges. ``together`` has the ranks
    that need the same rows as this one, of which the first sends and receives: the encoder
    replica's or, without sequence parallelism, those of the decoder's tensor parallel group, which
    have one part of the rows; None where this rank is alone.
    """

    there: dist.ProcessGroup
    back: dist.ProcessGroup
    together: dist.ProcessGroup | None


def apart_wire(
    pieces: Sequence[ApartPiece],
    transport: Transport | None,
    *,
    in_flight: int,
    device: torch.device,
    recorder: Recorder = NOTHING,
) -> Wire[ExchangeSpec]:
    """One rank's end of the edges from an encoder that lies apart.

    On the encoder's ranks, a unit of a step is a piece: of one decoder replica's microbatch, what
    one encoder replica makes. On the decoder's it is the whole microbatch. ``pieces``: of one
    microbatch of all decoder replicas, the same on every rank. ``transport`` is None on ranks that
    are at neither end.
    """
    groups, together = dict[Cargo, Over](), None
    if transport is not None:
        there, back, together = transport.there, transport.back, transport.together
        groups = {Cargo.FEATURES: lambda *_: there, Cargo.GRADIENTS: lambda *_: back}
    return Wire(
        groups,
        ends=partial(apart_ends, pieces=pieces, rank=dist.get_rank()),
        most=in_flight,
        device=device,
        recorder=recorder,
        together=together,
    )


def apart_ends(
    what: Cargo, units: ExchangeSpec, *, pieces: Sequence[ApartPiece], rank: int
) -> Ends:
    """What ``rank`` gives and takes of a step's units; ``pieces`` are of one microbatch."""
    made = [each.edge for each in pieces if rank in each.edge.encoder_ranks]
    needed = [each for each in pieces if rank in each.edge.decoder_ranks]
    assert not (made and needed), "an encoder apart is not where it leads"
    encoded, decoded = {}, {}
    for unit in range(len(units.tokens)):
        if made:
            microbatch, piece = divmod(unit, len(made))
            messages = _from_encoder(units, unit, edge=made[piece], rank=rank)
            encoded[unit] = PieceEnd(
                rows=units.tokens[unit], messages=messages, microbatch=microbatch
            )
        if needed:
            decoded[unit] = _to_decoder(units, unit, pieces=needed, rank=rank)
    given, taken = (decoded, encoded) if what.back else (encoded, decoded)
    return Ends(given=given, taken=taken, width=units.width, dtype=units.dtype)


def _from_encoder(
    units: ExchangeSpec, unit: int, *, edge: ApartEdge, rank: int
) -> tuple[PieceMessage, ...]:
    """A piece of the encoder's: each part of the sequence to the first rank that has it."""
    receivers = edge.feature_receivers(parts=units.parts)
    parts = zip(receivers, units.of_parts(unit), strict=True)
    leads = rank in edge.feature_senders
    return tuple(PieceMessage(peer=peer, rows=rows) for peer, rows in parts if leads)


def _to_decoder(
    units: ExchangeSpec, unit: int, *, pieces: Sequence[ApartPiece], rank: int
) -> PieceEnd:
    """A microbatch on a decoder's rank: by piece, which is the order of its rows."""
    ends = [0, *accumulate(units.row_tokens[unit])]
    part = pieces[0].edge.part_of(rank, parts=units.parts)
    messages, count = [], 0
    for edge, samples in ((each.edge, each.samples) for each in pieces):
        whole = slice(ends[samples.start], ends[samples.stop])
        behind = count + size(common(units.of_parts(unit)[part], (whole,)))
        if rank in edge.feature_receivers(parts=units.parts):
            (peer,) = edge.feature_senders
            messages.append(PieceMessage(peer=peer, rows=(slice(count, behind),)))
        count = behind
    return PieceEnd(rows=count, messages=tuple(messages), microbatch=unit)
