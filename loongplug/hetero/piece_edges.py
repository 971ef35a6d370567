"""Features of one piece to the decoder's first stage, and their gradient back, at any time.

Within a model replica, where an encoder lies on all ranks. A rank may be at both ends; what it has
itself it does not send. All ranks know all pieces of a step, numbered in the order of microbatches
and of the pieces within each, and who encodes which.

An encoder replica sends its pieces in that order, and takes their gradients in it; a consumer takes
all pieces, and gives gradients, in it, too. Receives are posted in it, some ahead. So the messages
from one rank to another are in one order at both ends.

With NCCL, two ranks have one queue for all that they send each other in a process group. So there
is one group for features to higher ranks and one for those to lower ranks, and two for gradients:
ranks of a tensor parallel group send each other features both ways, and each posts receives early.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.communicators import piece_pairs
from loongplug.hetero.exchange import ExchangeSpec, put, taken
from loongplug.hetero.placement import Edge
from loongplug.hetero.routes import Transfer, feature_transfers, gradient_transfers, size
from loongplug.hetero.sends import Coming, Sends, receive
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.parallel.connections import connect
from loongplug.parallel.states import create_exchange_group


@dataclass(frozen=True, kw_only=True)
class PieceGroups:
    """The process groups of a model replica, by what goes there, to higher and to lower ranks."""

    features: tuple[dist.ProcessGroup, dist.ProcessGroup]
    gradients: tuple[dist.ProcessGroup, dist.ProcessGroup]


def create_piece_groups(
    name: str,
    edges: Sequence[Edge],
    *,
    device: torch.device,
    timeout_minutes: float = 30,
    nccl_config_path: str | None = None,
) -> PieceGroups | None:
    """The groups of this rank's edge of the encoder ``name``, connected; None where it has none.

    ``edges`` are those of all model replicas. Collective over the world.
    """
    made = []
    for what in ("features", "gradients"):
        for up in (True, False):
            group = create_exchange_group(
                f"{name}_{what}_{'up' if up else 'down'}",
                [edge.ranks for edge in edges],
                options_of="mp",
                messages=True,
                timeout_minutes=timeout_minutes,
                nccl_config_path=nccl_config_path,
            )
            for edge in edges:
                if dist.get_rank() in edge.ranks:
                    pairs = piece_pairs(edge, back=what == "gradients", up=up)
                    connect(group, pairs, device=device)
            made.append(group)
    there_up, there_down, back_up, back_down = made
    if there_up is None or there_down is None or back_up is None or back_down is None:
        return None
    return PieceGroups(features=(there_up, there_down), gradients=(back_up, back_down))


@dataclass
class _Direction:
    """Of one rank: who sends what to whom, what is to come, and what is here already."""

    name: str
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    transfers: dict[int, list[Transfer]]  # by piece
    to_post: deque[Transfer]
    under_way: dict[Transfer, Coming] = field(default_factory=dict)
    kept: dict[int, Tensor] = field(default_factory=dict)  # by piece, for this rank itself

    def group(self, transfer: Transfer) -> dist.ProcessGroup:
        """Where it goes over."""
        to_higher, to_lower = self.groups
        return to_higher if transfer.source < transfer.target else to_lower


class PieceEdges:
    """One rank's ends of all edges of its model replica: four operations of one piece each.

    Nobody waits for a send before the step's end. Every row goes once to each rank that needs it; a
    message without rows is left out at both ends.
    """

    def __init__(
        self,
        edge: Edge,
        groups: PieceGroups,
        *,
        window: int,
        device: torch.device,
        recorder: Recorder = NOTHING,
    ) -> None:
        """``window``: how many receives of each direction are under way at a time."""
        assert window > 0, window
        self._edge = edge
        self._groups = groups
        self._window = window
        self._rank = dist.get_rank()
        self.device = device
        self._recorder = recorder
        self._sends: Sends | None = None  # of the step
        self._pieces: ExchangeSpec | None = None  # of the step
        self._features: _Direction | None = None
        self._gradients: _Direction | None = None

    def begin(self, pieces: ExchangeSpec, *, trains: bool) -> None:
        """A step of these pieces begins, which stand where units do; ``trains``: gradients return.

        The same on every rank of the model replica. ``shards`` are, by piece, the rows of it that
        each part of the sequence has.
        """
        assert self._features is None, "the last step has not ended"
        owners, parts = pieces.encoder_replicas, pieces.parts
        self._pieces = pieces
        # As many pieces as there are may be under way: nobody waits for a send.
        self._sends = Sends(most=len(pieces.tokens) + 1, recorder=self._recorder, of_pieces=True)
        self._features = self._direction(
            "features",
            self._groups.features,
            feature_transfers(self._edge, owners, parts=parts),
        )
        self._gradients = self._direction(
            "gradients",
            self._groups.gradients,
            gradient_transfers(self._edge, owners, parts=parts) if trains else [],
        )

    def send_features(self, piece: int, payload: Tensor) -> None:
        """``payload`` [tokens, width] of a piece that this rank's encoder replica has made."""
        pieces = self._now
        assert payload.dtype == pieces.dtype, f"{payload.dtype} where {pieces.dtype} is received"
        assert len(payload) == pieces.tokens[piece], (piece, payload.shape)
        way = _begun(self._features)
        for each in self._leaving(way, piece):
            self._give(way, each, taken(payload.detach(), pieces.rows(each)))

    def receive_features(self, piece: int) -> Tensor:
        """What this rank needs of a piece, [rows, width]. On consumers, of every piece in turn."""
        way = _begun(self._features)
        (transfer,) = self._coming(way, piece)
        return self._take(way, transfer)

    def send_gradient(self, piece: int, gradient: Tensor) -> None:
        """``gradient`` [rows, width] of what :meth:`receive_features` gave, on every consumer."""
        way = _begun(self._gradients)
        for each in self._leaving(way, piece):
            assert len(gradient) == size(self._now.rows(each)), (each, gradient.shape)
            self._give(way, each, gradient.detach())

    def receive_gradient(self, piece: int) -> Tensor:
        """Of a piece that this rank's encoder replica has made, [tokens, width]."""
        pieces, way = self._now, _begun(self._gradients)
        coming = list(self._coming(way, piece))
        if pieces.shards is None:
            (transfer,) = coming
            return self._take(way, transfer)
        # Every row lies in one part of the sequence, and is placed there.
        whole = torch.empty(
            pieces.tokens[piece], pieces.width, dtype=pieces.dtype, device=self.device
        )  # [tokens, width]
        for each in coming:
            put(self._take(way, each), pieces.rows(each), into=whole)
        return whole

    def drain(self) -> None:
        """At the step's end: wait for what is still being sent."""
        assert self._sends is not None, "no step has begun"
        self._sends.drain()
        for way in (_begun(self._features), _begun(self._gradients)):
            left = [*way.to_post, *way.under_way, *way.kept]
            assert not left, f"nobody took {way.name}: {left}"
        self._pieces = self._sends = self._features = self._gradients = None

    @property
    def _now(self) -> ExchangeSpec:
        assert self._pieces is not None, "no step has begun"
        return self._pieces

    def _direction(
        self,
        name: str,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        transfers: list[Transfer],
    ) -> _Direction:
        of_piece: dict[int, list[Transfer]] = {}
        for each in transfers:
            of_piece.setdefault(each.unit, []).append(each)
        come = (
            each
            for each in transfers
            if each.target == self._rank != each.source and size(self._now.rows(each))
        )
        way = _Direction(name=name, groups=groups, transfers=of_piece, to_post=deque(come))
        self._post(way)
        return way

    def _leaving(self, way: _Direction, piece: int) -> Iterator[Transfer]:
        return (each for each in way.transfers.get(piece, ()) if each.source == self._rank)

    def _coming(self, way: _Direction, piece: int) -> Iterator[Transfer]:
        return (each for each in way.transfers.get(piece, ()) if each.target == self._rank)

    def _give(self, way: _Direction, transfer: Transfer, rows: Tensor) -> None:
        if transfer.target == self._rank:
            way.kept[transfer.unit] = own_storage(rows)  # not all that it came with
            return
        if not len(rows):
            return
        assert self._sends is not None, "no step has begun"
        self._sends.send(
            rows,
            way.name,
            target=transfer.target,
            group=way.group(transfer),
            microbatch=transfer.unit,
        )

    def _take(self, way: _Direction, transfer: Transfer) -> Tensor:
        """Rows that are here, or come; before they are waited for, the next one may come, too."""
        if transfer.source == self._rank:
            return way.kept.pop(transfer.unit)
        if not size(self._now.rows(transfer)):
            return self._empty(0)
        assert transfer in way.under_way, f"{transfer} is not the next of {way.name}"
        coming = way.under_way.pop(transfer)
        self._post(way)
        return coming.arrived(self._recorder, way.name)

    def _post(self, way: _Direction) -> None:
        while way.to_post and len(way.under_way) < self._window:
            transfer = way.to_post.popleft()
            rows, group = self._empty(size(self._now.rows(transfer))), way.group(transfer)
            way.under_way[transfer] = receive(rows, source=transfer.source, group=group)

    def _empty(self, rows: int) -> Tensor:
        pieces = self._now
        return torch.empty(rows, pieces.width, dtype=pieces.dtype, device=self.device)


def _begun(way: _Direction | None) -> _Direction:
    assert way is not None, "no step has begun"
    return way


def own_storage(rows: Tensor) -> Tensor:
    """Clone views: a view keeps alive all that it is a part of."""
    if rows.untyped_storage().nbytes() == rows.nbytes:
        return rows
    return rows.clone()
