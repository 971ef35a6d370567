"""Features and their gradients between the ranks that encode and those that decode."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.data.microbatch import Share
from loongplug.hetero.placement import Edge
from loongplug.hetero.routes import (
    Rows,
    Transfer,
    common,
    feature_transfers,
    gradient_transfers,
    size,
    within,
)
from loongplug.observe.recorder import NOTHING, Recorder

_TOGETHER = 16  # units that go over at a time, unless more replicas have one each


@dataclass(frozen=True, kw_only=True)
class ExchangeSpec:
    """What every rank of a model replica knows of the units that travel together.

    ``tokens`` and ``shares`` by unit; a payload is [rows of the share, width] of ``dtype``.
    ``shards`` are, by unit, the rows of each part of the sequence, of which consumers need one;
    None where each needs all.
    ``row_tokens`` are, by unit, the tokens of each row of its microbatch.
    """

    tokens: tuple[int, ...]
    shares: tuple[tuple[Share, ...], ...]
    width: int
    dtype: torch.dtype
    shards: tuple[tuple[Rows, ...], ...] | None = None
    row_tokens: tuple[tuple[int, ...], ...] = ()

    def part(self, units: range) -> "ExchangeSpec":
        """Of these units alone, by their places here."""
        some = slice(units.start, units.stop)
        return replace(
            self,
            tokens=self.tokens[some],
            shares=self.shares[some],
            shards=None if self.shards is None else self.shards[some],
            row_tokens=self.row_tokens[some],
        )

    def lots(self, units: range) -> Iterator[range]:
        """These units, as many at a time as go over together; the same on every rank.

        What has come is copied out of what it came in, so that it is there twice for a moment.
        """
        replicas = {each for own in self.encoder_replicas[units.start : units.stop] for each in own}
        most = max(_TOGETHER, len(replicas))
        for start in range(units.start, units.stop, most):
            yield range(start, min(start + most, units.stop))

    @property
    def parts(self) -> int:
        """How many there are of each sequence."""
        return len(self.shards[0]) if self.shards else 1

    @property
    def encoder_replicas(self) -> tuple[tuple[int, ...], ...]:
        """By unit, those that have shares of it."""
        return tuple(tuple(each.encoder_replica for each in shares) for shares in self.shares)

    def encoded(self, transfer: Transfer) -> Rows:
        """What of the transfer's unit the replica has encoded."""
        shares = self.shares[transfer.unit]
        (share,) = (each for each in shares if each.encoder_replica == transfer.encoder_replica)
        return self._all(transfer.unit) if share.rows is None else share.rows

    def needed(self, transfer: Transfer) -> Rows:
        """What of the transfer's unit the consumer needs, of all shares."""
        return self.of_parts(transfer.unit)[transfer.shard]

    def of_parts(self, unit: int) -> tuple[Rows, ...]:
        """The rows that each part of the sequence needs of a unit."""
        return (self._all(unit),) if self.shards is None else self.shards[unit]

    def rows(self, transfer: Transfer) -> Rows:
        """What of its unit a transfer takes along."""
        return common(self.encoded(transfer), self.needed(transfer))

    def _all(self, unit: int) -> Rows:
        return (slice(0, self.tokens[unit]),)


class RowMove(NamedTuple):
    """Rows of a unit from one rank to another or itself: what one ``has`` and the other ``wants``.

    The target gets each row that it wants in one move.
    """

    unit: int
    source: int
    target: int
    has: Rows
    wants: Rows

    @property
    def rows(self) -> Rows:
        """Those that move."""
        return common(self.has, self.wants)


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
        """Whether features come to this rank."""
        return self._rank in self._edge.consumers

    def gather_variable_shape_embeddings(
        self, payloads: Mapping[int, Tensor], units: ExchangeSpec
    ) -> dict[int, Tensor]:
        """From the ranks that encoded to the consumers.

        Args:
            payloads: of each unit that this rank encoded a share of, [rows of the share, width].

        Returns:
            on the consumers, of every unit the rows that this one needs, [rows, width]; nothing
            elsewhere.
        """
        transfers = feature_transfers(self._edge, units.encoder_replicas, parts=units.parts)
        return self._move(payloads, transfers, units, has=units.encoded, wants=units.needed)

    def scatter_variable_shape_embeddings(
        self, gradients: Mapping[int, Tensor], units: ExchangeSpec
    ) -> dict[int, Tensor]:
        """From the consumers back to the ranks that encoded.

        Args:
            gradients: on the consumers, of every unit the rows that this one needed.

        Returns:
            the gradient of each share that this rank encoded by unit, [rows of the share, width].
        """
        transfers = gradient_transfers(self._edge, units.encoder_replicas, parts=units.parts)
        return self._move(gradients, transfers, units, has=units.needed, wants=units.encoded)

    def _move(
        self,
        own: Mapping[int, Tensor],
        transfers: Sequence[Transfer],
        units: ExchangeSpec,
        *,
        has: Callable[[Transfer], Rows],
        wants: Callable[[Transfer], Rows],
    ) -> dict[int, Tensor]:
        assert self._group is not None, "this rank is of no edge"
        moves = [
            RowMove(each.unit, each.source, each.target, has(each), wants(each))
            for each in transfers
            if self._rank in (each.source, each.target)
        ]
        nothing = torch.empty(0, units.width, dtype=units.dtype, device=self._device)
        with self._recorder.span("exchange", "units") as span:
            found, nbytes = moved(own, moves, like=nothing, group=self._group)
            span.note(bytes=nbytes)
        return found


def moved(
    own: Mapping[int, Tensor], moves: Sequence[RowMove], *, like: Tensor, group: dist.ProcessGroup
) -> tuple[dict[int, Tensor], int]:
    """What this rank gets of each unit, [rows, width], and how many bytes it has sent to others.

    Of what it has of units, ``own``; ``moves`` are those that it is in. One all-to-all: rows by the
    rank that they go to, each rank's in the order of moves. Collective: the group.
    """
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    sent, due = ({each: list[RowMove]() for each in ranks} for _ in range(2))
    leaving: dict[RowMove, Tensor] = {}
    arrived: dict[RowMove, Tensor] = {}
    for each in moves:
        if each.source == rank:
            leaving[each] = taken(own[each.unit], within(each.rows, each.has)).detach()
        if each.source == each.target:
            arrived[each] = leaving[each]
        elif each.source == rank:
            sent[each.target].append(each)
        else:
            due[each.source].append(each)
    given, coming = (
        [sum(size(each.rows) for each in some) for some in of_rank.values()]
        for of_rank in (sent, due)
    )
    going = [leaving[each] for each in chain(*sent.values())]
    out = going[0].contiguous() if len(going) == 1 else torch.cat([like, *going])
    rows = like.new_empty(sum(coming), like.shape[1])
    dist.all_to_all_single(rows, out, coming, given, group)
    others = [*chain(*due.values())]
    arrived |= zip(others, rows.split([size(each.rows) for each in others]), strict=True)
    found: dict[int, Tensor] = {}
    for unit, wants in {each.unit: each.wants for each in arrived}.items():
        parts = [(within(x.rows, wants), part) for x, part in arrived.items() if x.unit == unit]
        found[unit] = put_together(parts, rows=size(wants), like=like)
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
