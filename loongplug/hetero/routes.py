"""Who sends a unit's features to whom, and its gradients back. Pure; every rank knows all of it."""

from dataclasses import dataclass

from loongplug.hetero.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Rows of one unit from one rank to another (or the same), by their ranks in the world."""

    unit: int
    source: int
    target: int


def feature_transfers(placement: Placement, owners: tuple[int, ...]) -> list[Transfer]:
    """Each unit to every consumer, from a rank of the group that made it.

    All ranks of a group have the whole features; a consumer that is of the group keeps its own,
    and the others are served in turn by all ranks of the group.
    """
    transfers = []
    for unit, owner in enumerate(owners):
        group = placement.groups[owner]
        for index, consumer in enumerate(placement.consumers):
            source = consumer if consumer in group else group[index % len(group)]
            transfers.append(Transfer(unit=unit, source=source, target=consumer))
    return transfers


def gradient_transfers(placement: Placement, owners: tuple[int, ...]) -> list[Transfer]:
    """Each unit's gradient to every rank of the group that made it, from one consumer.

    All consumers have the whole gradient; the units are spread over them.
    """
    transfers = []
    for unit, owner in enumerate(owners):
        group = placement.groups[owner]
        for index, target in enumerate(group):
            others = placement.consumers[(owner * len(group) + index) % len(placement.consumers)]
            source = target if target in placement.consumers else others
            transfers.append(Transfer(unit=unit, source=source, target=target))
    return transfers
