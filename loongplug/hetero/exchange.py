"""Features and their gradients between the ranks that encode and those that decode."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
        return self.of_parts(transfer.unit)[transfer.shard or 0]

    def of_parts(self, unit: int) -> tuple[Rows, ...]:
        """The rows that each part of the sequence needs of a unit."""
        return (self._all(unit),) if self.shards is None else self.shards[unit]

    def rows(self, transfer: Transfer) -> Rows:
        """What of its unit a transfer takes along."""
        return common(self.encoded(transfer), self.needed(transfer))

    def _all(self, unit: int) -> Rows:
        return (slice(0, self.tokens[unit]),)


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
        self._ranks = edge.ranks
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
        out = {
            each: taken(payloads[each.unit], within(units.rows(each), units.encoded(each)))
            for each in transfers
            if each.source == self._rank
        }
        return _whole(self._move(out, transfers, units), units, of=units.needed)

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
        out = {
            each: taken(gradients[each.unit], within(units.rows(each), units.needed(each)))
            for each in transfers
            if each.source == self._rank
        }
        return _whole(self._move(out, transfers, units), units, of=units.encoded)

    def _move(
        self, out: Mapping[Transfer, Tensor], transfers: Sequence[Transfer], units: ExchangeSpec
    ) -> dict[Transfer, Tensor]:
        """One all-to-all: rows by the rank they go to, each rank's in the order of transfers.

        Returns what is due here, with what is here already.
        """
        assert self._group is not None, "this rank is of no edge"
        sent: list[list[Transfer]] = [[] for _ in self._ranks]
        due: list[list[Transfer]] = [[] for _ in self._ranks]
        kept = {}
        for each in transfers:
            if each.source == each.target:
                if each.target == self._rank:
                    kept[each] = out[each].detach()
            elif each.source == self._rank:
                sent[self._ranks.index(each.target)].append(each)
            elif each.target == self._rank:
                due[self._ranks.index(each.source)].append(each)
        arrived = [each for of_rank in due for each in of_rank]
        sizes = {each: size(units.rows(each)) for each in arrived}
        leaving = [[out[each].detach() for each in of_rank] for of_rank in sent]
        coming = [sum(sizes[each] for each in of_rank) for of_rank in due]
        rows = torch.empty(sum(coming), units.width, dtype=units.dtype, device=self._device)
        nbytes = sum(part.nbytes for of_rank in leaving for part in of_rank)
        with self._recorder.span("exchange", "units", bytes=nbytes):
            all_to_all(leaving, rows, coming, group=self._group)
        parts = rows.split([sizes[each] for each in arrived]) if arrived else ()
        return kept | dict(zip(arrived, parts, strict=True))


def all_to_all(
    leaving: Sequence[Sequence[Tensor]],
    rows: Tensor,
    coming: Sequence[int],
    *,
    group: dist.ProcessGroup,
) -> None:
    """Parts [rows, width] to each rank of ``group``, and so many ``rows`` from each, in order.

    Collective: one call, also of ranks without rows. One part alone is no copy.
    """
    flat = [part for of_rank in leaving for part in of_rank]
    out = flat[0].contiguous() if len(flat) == 1 else torch.cat([rows[:0], *flat])
    given = [sum(map(len, of_rank)) for of_rank in leaving]
    dist.all_to_all_single(rows, out, list(coming), given, group)


def _whole(
    parts: Mapping[Transfer, Tensor], units: ExchangeSpec, *, of: Callable[[Transfer], Rows]
) -> dict[int, Tensor]:
    """By unit, what has come of it, put together to the rows ``of`` a transfer, [rows, width].

    Every one of them has come once.
    """
    found: dict[int, Tensor] = {}
    for each, part in parts.items():
        whole = of(each)
        if len(part) == size(whole):
            found[each.unit] = part
            continue
        if each.unit not in found:
            found[each.unit] = part.new_empty(size(whole), units.width)  # [rows, width]
        put(part, within(units.rows(each), whole), into=found[each.unit])
    return found


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
