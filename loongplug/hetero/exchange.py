"""Features and their gradients between the ranks that encode and those that decode."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.placement import Edge
from loongplug.hetero.row_moves import (
    ExchangeSpec,
    RowMove,
    Rows,
    feature_moves,
    gradient_moves,
    size,
)
from loongplug.observe.recorder import NOTHING, Recorder


class AllToAll:
    """Moves payloads within one model replica: exactly the rows that a rank needs, once.

    ``group`` has all ranks of the edge. Every rank of it enters every call; one without rows takes
    part with none. Ranks that are not of the edge have no group and enter none.
    """

    def __init__(
        self,
        edge: Edge,
        group: dist.ProcessGroup | None,
        *,
        device: torch.device,
        recorder: Recorder = NOTHING,
    ) -> None:
        of_group = () if group is None else dist.get_process_group_ranks(group)
        assert not of_group or tuple(of_group) == edge.ranks, (of_group, edge)
        self._edge = edge
        self._group = group
        self._rank = dist.get_rank()
        self._device = device
        self._recorder = recorder

    @property
    def consumes(self) -> bool:
        return self._rank in self._edge.consumers

    def gather_variable_shape_embeddings(
        self, payloads: Mapping[int, Tensor], units: ExchangeSpec
    ) -> dict[int, Tensor]:
        """What a consumer needs of every unit, [rows, width]; nothing on other ranks.

        ``payloads`` are of units that this rank encoded a share of, [rows of the share, width].
        """
        return self._move(payloads, feature_moves(self._edge, units, rank=self._rank), units)

    def scatter_variable_shape_embeddings(
        self, gradients: Mapping[int, Tensor], units: ExchangeSpec
    ) -> dict[int, Tensor]:
        """The gradient of each share that this rank encoded, by unit, [rows of the share, width].

        ``gradients`` are, on the consumers, of the rows that this one needed of every unit.
        """
        return self._move(gradients, gradient_moves(self._edge, units, rank=self._rank), units)

    def _move(
        self, own: Mapping[int, Tensor], moves: Iterable[RowMove], units: ExchangeSpec
    ) -> dict[int, Tensor]:
        assert self._group is not None, "this rank is of no edge"
        nothing = torch.empty(0, units.width, dtype=units.dtype, device=self._device)
        with self._recorder.span("exchange", "units") as span:
            found, nbytes = moved(own, [*moves], like=nothing, group=self._group)
            span.note(bytes=nbytes)
        return found


def moved(
    own: Mapping[int, Tensor], moves: Sequence[RowMove], *, like: Tensor, group: dist.ProcessGroup
) -> tuple[dict[int, Tensor], int]:
    """What this rank gets of each piece, [rows, width], and how many bytes it has sent to others.

    Of what it has of pieces, ``own``; ``moves`` are those that it is in. One all-to-all: rows by
    the rank that they go to, each rank's in the order of moves. Collective: the group.
    """
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    sent, due = ({each: list[RowMove]() for each in ranks} for _ in range(2))
    leaving: dict[RowMove, Tensor] = {}
    arrived: dict[RowMove, Tensor] = {}
    for each in moves:
        if each.source == rank:
            leaving[each] = taken(own[each.piece], each.given).detach()
        if each.source == each.target:
            arrived[each] = leaving[each]
        elif each.source == rank:
            sent[each.target].append(each)
        else:
            due[each.source].append(each)
    given, coming = (
        [sum(size(each.given) for each in some) for some in of_rank.values()]
        for of_rank in (sent, due)
    )
    going = [leaving[each] for each in chain(*sent.values())]
    out = going[0].contiguous() if len(going) == 1 else torch.cat([like, *going])
    rows = like.new_empty(sum(coming), like.shape[1])
    dist.all_to_all_single(rows, out, coming, given, group)
    others = [*chain(*due.values())]
    arrived |= zip(others, rows.split([size(each.placed) for each in others]), strict=True)
    found: dict[int, Tensor] = {}
    for piece in dict.fromkeys(each.piece for each in arrived):
        parts = [(each.placed, part) for each, part in arrived.items() if each.piece == piece]
        found[piece] = put_together(parts, rows=sum(size(x) for x, _ in parts), like=like)
    return found, out.nbytes


def put_together(parts: Iterable[tuple[Rows, Tensor]], *, rows: int, like: Tensor) -> Tensor:
    """So many ``rows`` of parts, each at its places, [rows, width]; one that has all stays it."""
    whole = None
    for places, part in parts:
        if len(part) == rows:
            return part
        whole = like.new_empty(rows, like.shape[1]) if whole is None else whole
        put(part, places, into=whole)
    return like.new_empty(rows, like.shape[1]) if whole is None else whole


def taken(payload: Tensor, rows: Rows) -> Tensor:
    """These rows of a payload, [rows, width]."""
    if len(rows) == 1:
        return payload[rows[0]]
    return torch.cat([payload[:0], *(payload[each] for each in rows)])


def put(values: Tensor, rows: Rows, *, into: Tensor) -> None:
    """The reverse of :func:`taken`."""
    parts: Iterable[Tensor] = values.split([size((each,)) for each in rows]) if rows else ()
    for each, part in zip(rows, parts, strict=True):
        into[each] = part


def own_storage(rows: Tensor) -> Tensor:
    """Clone views: a view keeps alive all that it is a part of."""
    if rows.untyped_storage().nbytes() == rows.nbytes:
        return rows
    return rows.clone()
