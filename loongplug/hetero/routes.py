"""Who sends which of a unit's features to whom, and gradients back. Pure; every rank knows all.

With context parallelism, each rank of a row holds a part of it, and with sequence parallelism, rank
t of a tensor parallel group of n holds the t-th of n equal chunks of that. So it needs only the
features of the visual tokens that lie there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from loongplug.context.token_split import TokenSplit
from loongplug.hetero.placement import Edge

Rows = tuple[slice, ...]  # of a unit's features, ascending, without overlap


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Rows of one unit from one rank to another (or the same), by their ranks in the world.

    They are of the share that ``encoder_replica`` encodes. ``shard`` numbers
    the part of the sequence that they lie in.
    """

    unit: int
    encoder_replica: int
    source: int
    target: int
    shard: int = 0


def feature_transfers(
    edge: Edge, encoder_replicas: Sequence[Sequence[int]], *, parts: int = 1
) -> list[Transfer]:
    """Each share of a unit to every consumer, from a rank of the replica that made it.

    ``encoder_replicas`` are, by unit, those that have shares. All ranks of a replica have the whole
    features of its share; a consumer that is of the replica keeps its own, and the others are
    served in turn by all ranks of the replica. Of a sequence in several ``parts``, each consumer
    gets only the rows of its own.
    """
    transfers = []
    for unit, encoder_replica in _shares(encoder_replicas):
        replica = edge.replicas[encoder_replica]
        for index, (shard, consumer) in enumerate(
            (shard, rank) for shard, ranks in enumerate(edge.parts(parts)) for rank in ranks
        ):
            transfers.append(
                Transfer(
                    unit=unit,
                    encoder_replica=encoder_replica,
                    source=consumer if consumer in replica else replica[index % len(replica)],
                    target=consumer,
                    shard=shard,
                )
            )
    return transfers


def gradient_transfers(
    edge: Edge, encoder_replicas: Sequence[Sequence[int]], *, parts: int = 1
) -> list[Transfer]:
    """Each share's gradient to every rank of the replica that made it.

    All consumers have the whole gradient and one of them sends it, each in turn. Of a sequence in
    several ``parts``, those of one have the gradient of its rows, and one of each part sends.
    """
    transfers = []
    for unit, encoder_replica in _shares(encoder_replicas):
        replica = edge.replicas[encoder_replica]
        for index, target in enumerate(replica):
            turn = encoder_replica * len(replica) + index
            transfers += [
                Transfer(
                    unit=unit,
                    encoder_replica=encoder_replica,
                    source=target if target in ranks else ranks[turn % len(ranks)],
                    target=target,
                    shard=shard,
                )
                for shard, ranks in enumerate(edge.parts(parts))
            ]
    return transfers


def _shares(encoder_replicas: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(unit, each) for unit, several in enumerate(encoder_replicas) for each in several]


def sequence_shards(
    places: Sequence[NDArray[np.int64]], *, split: TokenSplit, tp: int = 1
) -> tuple[Rows, ...]:
    """The rows that each part of the sequence needs: those of ``split``, each in ``tp`` chunks.

    Neighbours are chunks of one part. A slice is of one row of the microbatch, and of one stretch
    of its tokens.

    Args:
        places: of each row of the microbatch, where its visual tokens lie, ascending.
        split: of each row's tokens, with padding.
    """
    shards = []
    for held in (chunk for part in split.parts for chunk in part.chunks(tp)):
        shard, start = [], 0
        for row in places:
            firsts = (start + np.searchsorted(row, held.starts)).tolist()
            behinds = (start + np.searchsorted(row, held.stops)).tolist()
            pairs = zip(firsts, behinds, strict=True)
            shard += [slice(first, behind) for first, behind in pairs if behind > first]
            start += len(row)
        shards.append(tuple(shard))
    return tuple(shards)


def common(rows: Rows, others: Rows) -> Rows:
    """What both have; each slice lies within one of ``rows`` and one of ``others``."""
    pairs = [(max(x.start, y.start), min(x.stop, y.stop)) for x in rows for y in others]
    return tuple(slice(first, behind) for first, behind in pairs if behind > first)


def joined(several: Iterable[Rows]) -> Rows:
    """All rows of several that have none in common; neighbours are one slice."""
    found: list[slice] = []
    for each in sorted(chain.from_iterable(several), key=lambda each: (each.start, each.stop)):
        first = found.pop().start if found and found[-1].stop == each.start else each.start
        found.append(slice(first, each.stop))
    return tuple(found)


def within(rows: Rows, whole: Rows) -> Rows:
    """Where ``rows`` lie when those of ``whole`` are put side by side; neighbours are one slice.

    Each slice of ``rows`` lies within one of ``whole``.
    """
    found: list[slice] = []
    start = 0
    for each in whole:
        by = start - each.start
        inside = (part for part in rows if each.start <= part.start < each.stop)
        found += (slice(part.start + by, part.stop + by) for part in inside)
        start += each.stop - each.start
    return joined([tuple(found)])


def size(rows: Rows) -> int:
    """How many rows these are."""
    return sum(each.stop - each.start for each in rows)
