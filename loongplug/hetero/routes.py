"""Who sends a unit's features to whom, and its gradients back. Pure; every rank knows all of it."""

from dataclasses import dataclass

from loongplug.hetero.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Rows of one unit from one rank to another (or the same), by their ranks in the world.

    ``share`` is the place among the consumers of the one whose rows these are; None for all rows.
    """

    unit: int
    source: int
    target: int
    share: int | None = None


def feature_transfers(
    placement: Placement, owners: tuple[int, ...], *, shared: bool = False
) -> list[Transfer]:
    """Each unit to every consumer, from a rank of the group that made it.

    All ranks of a group have the whole features; a consumer that is of the group keeps its own,
    and the others are served in turn by all ranks of the group. With ``shared``, each consumer
    gets only its own rows.
    """
    transfers = []
    for unit, owner in enumerate(owners):
        group = placement.groups[owner]
        for index, consumer in enumerate(placement.consumers):
            source = consumer if consumer in group else group[index % len(group)]
            share = index if shared else None
            transfers.append(Transfer(unit=unit, source=source, target=consumer, share=share))
    return transfers


def gradient_transfers(
    placement: Placement, owners: tuple[int, ...], *, shared: bool = False
) -> list[Transfer]:
    """Each unit's gradient to every rank of the group that made it.

    All consumers have the whole gradient and one of them sends it, each in turn. With ``shared``,
    each has that of its own rows, and all send.
    """
    transfers = []
    for unit, owner in enumerate(owners):
        group = placement.groups[owner]
        for index, target in enumerate(group):
            if shared:
                transfers += [
                    Transfer(unit=unit, source=source, target=target, share=share)
                    for share, source in enumerate(placement.consumers)
                ]
                continue
            turn = placement.consumers[(unit * len(group) + index) % len(placement.consumers)]
            source = target if target in placement.consumers else turn
            transfers.append(Transfer(unit=unit, source=source, target=target))
    return transfers
