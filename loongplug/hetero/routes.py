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

    ``shard`` is the place among the consumers of the one whose rows these are; None for all rows.
    """

    unit: int
    source: int
    target: int
    shard: int | None = None


def feature_transfers(
    edge: Edge, encoder_replicas: tuple[int, ...], *, sharded: bool = False
) -> list[Transfer]:
    """Each unit to every consumer, from a rank of the replica that made it.

    All ranks of a replica have the whole features; a consumer that is of the replica keeps its
    own, and the others are served in turn by all ranks of the replica. With ``sharded``, each
    consumer gets only its own rows.
    """
    transfers = []
    for unit, encoder_replica in enumerate(encoder_replicas):
        replica = edge.replicas[encoder_replica]
        for index, consumer in enumerate(edge.consumers):
            source = consumer if consumer in replica else replica[index % len(replica)]
            shard = index if sharded else None
            transfers.append(Transfer(unit=unit, source=source, target=consumer, shard=shard))
    return transfers


def gradient_transfers(
    edge: Edge, encoder_replicas: tuple[int, ...], *, sharded: bool = False
) -> list[Transfer]:
    """Each unit's gradient to every rank of the replica that made it.

    All consumers have the whole gradient and one of them sends it, each in turn. With ``sharded``,
    each has that of its own rows, and all send.
    """
    transfers = []
    for unit, encoder_replica in enumerate(encoder_replicas):
        replica = edge.replicas[encoder_replica]
        for index, target in enumerate(replica):
            if sharded:
                transfers += [
                    Transfer(unit=unit, source=source, target=target, shard=shard)
                    for shard, source in enumerate(edge.consumers)
                ]
                continue
            turn = edge.consumers[(unit * len(replica) + index) % len(edge.consumers)]
            source = target if target in edge.consumers else turn
            transfers.append(Transfer(unit=unit, source=source, target=target))
    return transfers


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


def size(rows: Rows) -> int:
    """How many rows these are."""
    return sum(each.stop - each.start for each in rows)
