"""Who sends which of a unit's features to whom, and gradients back. Pure; every rank knows all.

With sequence parallelism, rank t of a tensor parallel group of n holds the t-th of n equal parts
of the sequence, and so needs only the features of the visual tokens that lie there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from loongplug.hetero.placement import Edge

Rows = tuple[slice, ...]  # of a unit's features, ascending, without overlap


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Rows of one unit from one rank to another (or the same), by their ranks in the world.

    They are of the share that ``encoder_replica`` encodes. ``shard`` is the place among the
    consumers of the one that needs them; None where each needs all rows of the share.
    """

    unit: int
    encoder_replica: int
    source: int
    target: int
    shard: int | None = None


def feature_transfers(
    edge: Edge, encoder_replicas: Sequence[Sequence[int]], *, sharded: bool = False
) -> list[Transfer]:
    """Each share of a unit to every consumer, from a rank of the replica that made it.

    ``encoder_replicas`` are, by unit, those that have shares. All ranks of a replica have the whole
    features of its share; a consumer that is of the replica keeps its own, and the others are
    served in turn by all ranks of the replica. With ``sharded``, each consumer gets only its own
    rows.
    """
    transfers = []
    for unit, encoder_replica in _shares(encoder_replicas):
        replica = edge.replicas[encoder_replica]
        for index, consumer in enumerate(edge.consumers):
            transfers.append(
                Transfer(
                    unit=unit,
                    encoder_replica=encoder_replica,
                    source=consumer if consumer in replica else replica[index % len(replica)],
                    target=consumer,
                    shard=index if sharded else None,
                )
            )
    return transfers


def gradient_transfers(
    edge: Edge, encoder_replicas: Sequence[Sequence[int]], *, sharded: bool = False
) -> list[Transfer]:
    """Each share's gradient to every rank of the replica that made it.

    All consumers have the whole gradient and one of them sends it, each in turn. With ``sharded``,
    each has that of its own rows, and all send.
    """
    transfers = []
    for unit, encoder_replica in _shares(encoder_replicas):
        replica = edge.replicas[encoder_replica]
        for index, target in enumerate(replica):
            turn = edge.consumers[(unit * len(replica) + index) % len(edge.consumers)]
            whole = target if target in edge.consumers else turn
            sources = enumerate(edge.consumers) if sharded else [(None, whole)]
            transfers += [
                Transfer(
                    unit=unit,
                    encoder_replica=encoder_replica,
                    source=source,
                    target=target,
                    shard=shard,
                )
                for shard, source in sources
            ]
    return transfers


def _shares(encoder_replicas: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(unit, each) for unit, several in enumerate(encoder_replicas) for each in several]


def sequence_shards(
    places: Sequence[NDArray[np.int64]], *, length: int, parts: int
) -> tuple[Rows, ...]:
    """The rows that each of ``parts`` ranks needs; one slice per row of the microbatch.

    Args:
        places: of each row of the microbatch, where its visual tokens lie, ascending.
        length: of the sequence, with padding.
    """
    assert length % parts == 0, (length, parts)
    bounds = np.arange(parts + 1) * (length // parts)
    shards: list[list[slice]] = [[] for _ in range(parts)]
    start = 0
    for row in places:
        cuts = (start + np.searchsorted(row, bounds)).tolist()
        for shard, (first, behind) in zip(shards, pairwise(cuts), strict=True):
            if behind > first:
                shard.append(slice(first, behind))
        start += len(row)
    return tuple(tuple(shard) for shard in shards)


def common(rows: Rows, others: Rows) -> Rows:
    """What both have; each slice lies within one of ``rows`` and one of ``others``."""
    pairs = [(max(x.start, y.start), min(x.stop, y.stop)) for x in rows for y in others]
    return tuple(slice(first, behind) for first, behind in pairs if behind > first)


def within(rows: Rows, whole: Rows) -> Rows:
    """Where ``rows`` lie when those of ``whole`` are put side by side; neighbours are one slice.

    Each slice of ``rows`` lies within one of ``whole``.
    """
    found: list[slice] = []
    start = 0
    for each in whole:
        for part in rows:
            if each.start <= part.start < each.stop:
                first = start + part.start - each.start
                behind = first + part.stop - part.start
                if found and found[-1].stop == first:
                    first = found.pop().start
                found.append(slice(first, behind))
        start += each.stop - each.start
    return tuple(found)


def size(rows: Rows) -> int:
    """How many rows these are."""
    return sum(each.stop - each.start for each in rows)
