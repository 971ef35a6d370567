"""Features from an encoder on ranks of its own to the decoder, and their gradients back."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.exchange import ExchangeSpec, put, taken
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import ApartPiece
from loongplug.hetero.routes import Rows, size
from loongplug.hetero.sends import Coming, Sends, receive
from loongplug.observe.recorder import NOTHING, Recorder

WINDOW = 2  # microbatches whose features a decoder's rank receives ahead


@dataclass(frozen=True, kw_only=True)
class Transport:
    """The process groups of an encoder's edges.

    Each direction has a group of its own, with all ranks of all edges: with NCCL, what goes there
    and what comes back would wait for one another in one queue. ``together`` has the ranks that
    need the same rows as this one, of which the first sends and receives: the encoder replica's
    or, without sequence parallelism, those of the decoder's tensor parallel group, which
    have one part of the rows; None where this rank is alone.
    """

    there: dist.ProcessGroup
    back: dist.ProcessGroup
    together: dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True)
class _Message:
    """Rows of a piece between one encoder rank and one decoder rank."""

    peer: int
    rows: Rows  # of the piece


_Receiving = tuple[_Message, Coming]


class Edges:
    """One rank's end of the edges from an encoder that lies apart.

    Nobody waits for a send before the step's end, as long as what is under way is of no more than
    ``in_flight`` microbatches. Receives are posted ahead: an encoder's of the gradients that it
    takes next, a decoder's of features ``window`` microbatches early. Where a GPU has one queue for
    all its work, more of them would hold up what the others need to go on. Both sides know the
    number of rows from the text. Every row goes over once each way; a message without rows is left
    out on both sides. Peers meet once for each microbatch, always in their order.
    """

    def __init__(
        self,
        pieces: Sequence[ApartPiece],
        transport: Transport | None,
        *,
        window: int,
        in_flight: int,
        device: torch.device,
        recorder: Recorder = NOTHING,
    ) -> None:
        """``pieces``: of one microbatch of all decoder replicas, the same on every rank.

        ``transport`` is None on ranks that are at neither end.
        """
        rank = dist.get_rank()
        self._made = [each for each in pieces if rank in each.edge.encoder_ranks]
        self._needed = [each for each in pieces if rank in each.edge.decoder_ranks]
        assert not (self._made and self._needed), "an encoder apart is not where it leads"
        self._transport = transport
        self._window = window
        self._rank = rank
        self._device = device
        self._recorder = recorder
        self._spec: ExchangeSpec | None = None  # of all units of the step
        self._trains = False
        self._sends = Sends(most=in_flight, recorder=recorder)
        self._receiving: dict[int, list[_Receiving]] = {}  # by unit, in the order of rows
        self._owed: deque[tuple[int, list[_Message]]] = deque()  # units whose gradients are to come

    @property
    def consumes(self) -> bool:
        """Whether features come to this rank."""
        return bool(self._needed)

    def begin(self, units: ExchangeSpec, *, trains: bool) -> None:
        """A step of these units begins; ``trains``: gradients go back."""
        assert not self._receiving, "the last step has not ended"
        self._spec, self._trains = units, trains
        if self._needed:
            for unit in range(min(self._window, len(units.tokens))):
                self._post(unit)

    def gather_variable_shape_embeddings(
        self, payloads: Mapping[int, Tensor], units: ExchangeSpec
    ) -> dict[int, Tensor]:
        """Features of one unit, from the encoder's rank or to the decoder's.

        An encoder's rank gives the payload of its piece, [tokens, width]. A decoder's gets the
        rows that it needs of its microbatch, [rows, width]; ranks of one ``together`` enter
        together.
        """
        if not self._needed:
            self._send(payloads[0], units)
            return {}
        return {0: self._take(units)}

    def scatter_variable_shape_embeddings(
        self, gradients: Mapping[int, Tensor], units: ExchangeSpec
    ) -> dict[int, Tensor]:
        """Gradients of one unit's features, the other way; see the other direction."""
        if not self._needed:
            return {0: self._take_gradient(units)}
        self._give_back(gradients[0], units)
        return {}

    def send(self, what: Cargo, piece: int, rows: Tensor | None) -> None:
        """A piece's features, or a microbatch's gradients."""
        assert self._spec is not None
        assert rows is not None
        units = self._spec.part(range(piece, piece + 1))
        if what is Cargo.FEATURES:
            self.gather_variable_shape_embeddings({0: rows}, units)
        else:
            self.scatter_variable_shape_embeddings({0: rows}, units)

    def receive(self, what: Cargo, piece: int) -> Tensor:
        """A microbatch's features, or a piece's gradients."""
        assert self._spec is not None
        units = self._spec.part(range(piece, piece + 1))
        if what is Cargo.FEATURES:
            return self.gather_variable_shape_embeddings({}, units)[0]
        return self.scatter_variable_shape_embeddings({}, units)[0]

    def drain(self) -> None:
        """At the step's end: wait for what is still being sent."""
        self._sends.drain()
        assert not self._receiving, f"nobody took units {list(self._receiving)}"

    def _send(self, payload: Tensor, units: ExchangeSpec) -> None:
        assert payload.dtype == units.dtype, f"{payload.dtype} where {units.dtype} is received"
        unit = units.first
        piece = self._made[unit % len(self._made)]
        messages = self._messages(piece, units, whole=range(len(units.row_tokens[0])))
        rows = [taken(payload.detach(), each.rows) for each in messages]
        for message, each in zip(messages, rows, strict=True):
            self._isend(each, message.peer, unit=unit)
        if self._trains:
            self._owed.append((unit, messages))
            if not self._receiving:
                self._post_gradients()

    def _take(self, units: ExchangeSpec) -> Tensor:
        unit = units.first
        assert self._spec is not None
        if unit + self._window < len(self._spec.tokens):
            self._post(unit + self._window)
        rows = self._cat([coming.rows for _, coming in self._received(unit)], units)
        return self._shared(rows, self._consumed(units), units)

    def _give_back(self, gradient: Tensor, units: ExchangeSpec) -> None:
        start = 0
        for piece in self._needed:
            for message in self._messages(piece, units, whole=piece.samples):
                count = size(message.rows)
                part = gradient.detach()[start : start + count].contiguous()
                self._isend(part, message.peer, unit=units.first)
                start += count
        assert start in (0, gradient.shape[0]), (start, gradient.shape)

    def _take_gradient(self, units: ExchangeSpec) -> Tensor:
        tokens = units.tokens[0]
        # Every row lies in one part of the sequence, and is placed there.
        whole = torch.empty(tokens, units.width, dtype=units.dtype, device=self._device)
        received = self._received(units.first)
        self._post_gradients()
        for message, coming in received:
            put(coming.rows, message.rows, into=whole)
        return self._shared(whole, tokens, units)

    def _consumed(self, unit: ExchangeSpec) -> int:
        """How many rows of a unit this rank's part of the sequence has."""
        if unit.shards is None:
            return unit.tokens[0]
        part = self._needed[0].edge.part_of(self._rank, parts=unit.parts)
        return size(unit.shards[0][part])

    def _post_gradients(self) -> None:
        """Receive those of the next unit, where there is one."""
        if self._owed:
            unit, messages = self._owed.popleft()
            self._receiving[unit] = [self._irecv(each, back=True) for each in messages]

    def _received(self, unit: int) -> list[_Receiving]:
        """What was to come of a unit, once it is there."""
        received = self._receiving.pop(unit)
        what, microbatch = "features" if self._needed else "gradients", self._microbatch(unit)
        for _, coming in received:
            coming.arrived(self._recorder, what, microbatch=microbatch)
        return received

    def _microbatch(self, unit: int) -> int:
        """The number of a unit's microbatch, of which an encoder replica may make several."""
        return unit if self._needed else unit // len(self._made)

    def _post(self, unit: int) -> None:
        """Receive a microbatch's features: by piece, which is the order of its rows."""
        assert self._spec is not None
        alone = self._spec.part(range(unit, unit + 1))
        self._receiving[unit] = [
            self._irecv(message, back=False)
            for piece in self._needed
            for message in self._messages(piece, alone, whole=piece.samples)
        ]

    def _messages(self, piece: ApartPiece, unit: ExchangeSpec, *, whole: range) -> list[_Message]:
        """What this rank sends and receives of a piece, by the peer; ``whole`` are its rows.

        ``unit`` is the piece itself on the encoder's side, and all of the microbatch, of which the
        piece has the rows ``whole``, on the decoder's.
        """
        edge, tokens = piece.edge, unit.row_tokens[0]
        ends = list(accumulate(tokens, initial=0))
        first, behind = ends[whole.start], ends[whole.stop]
        parts: Sequence[Rows] = ((slice(first, behind),),)
        if unit.shards is not None:
            parts = [_within(shard, first, behind) for shard in unit.shards[0]]
        parts = [tuple(slice(x.start - first, x.stop - first) for x in rows) for rows in parts]
        receivers = edge.feature_receivers(parts=unit.parts)
        senders = edge.feature_senders
        pairs = list(zip(receivers, parts, strict=True))
        if self._rank in senders:
            found = [_Message(peer=rank, rows=rows) for rank, rows in pairs]
        else:
            found = [
                _Message(peer=senders[0], rows=rows) for rank, rows in pairs if rank == self._rank
            ]
        return [each for each in found if size(each.rows)]

    def _shared(self, rows: Tensor, count: int, units: ExchangeSpec) -> Tensor:
        """``rows`` of the first rank, on all that need the same."""
        together = self._groups.together
        if together is None or not count:
            return rows
        if dist.get_rank(together):
            rows = torch.empty(count, units.width, dtype=units.dtype, device=self._device)
        dist.broadcast(rows, group=together, group_src=0)
        return rows

    def _cat(self, parts: Sequence[Tensor], units: ExchangeSpec) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        empty = torch.empty(0, units.width, dtype=units.dtype, device=self._device)
        return torch.cat([empty, *parts])

    def _isend(self, rows: Tensor, peer: int, *, unit: int) -> None:
        """Features from an encoder's rank, or gradients from a decoder's."""
        group = self._groups.back if self._needed else self._groups.there
        what, microbatch = "gradients" if self._needed else "features", self._microbatch(unit)
        self._sends.send(rows, what, target=peer, group=group, microbatch=microbatch)

    def _irecv(self, message: _Message, *, back: bool) -> _Receiving:
        spec, groups = self._spec, self._groups
        assert spec is not None
        rows = torch.empty(size(message.rows), spec.width, dtype=spec.dtype, device=self._device)
        group = groups.back if back else groups.there
        return message, receive(rows, source=message.peer, group=group)

    @property
    def _groups(self) -> Transport:
        assert self._transport is not None, "this rank is at neither end"
        return self._transport


def _within(rows: Rows, first: int, behind: int) -> Rows:
    """Those of ``rows`` from ``first`` on; none of them crosses a row of the microbatch."""
    return tuple(each for each in rows if first <= each.start < behind)
