"""Who sends a unit's features to whom, and its gradients back. Pure; every rank knows all of it."""

from dataclasses import dataclass

from loongplug.hetero.placement import Edge


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
