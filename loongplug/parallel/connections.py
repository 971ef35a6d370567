"""Connections between two ranks, made before they are needed."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from loongplug.parallel.states import create_exchange_group


def connect(
    group: dist.ProcessGroup | None, pairs: Iterable[tuple[int, int]], *, device: torch.device
) -> None:
    """Send one number from the first to the second rank of each of ``pairs``, in their order.

    NCCL makes the connection of two ranks at their first message, and the host waits there until
    both have come to it. In a step, one of them would wait for the other's features first, and
    both for ever. Collective over the ranks of ``pairs``, which are of the ``group`` and the same
    on all of them; a rank without the group does nothing.
    """
    if group is None:
        return
    rank, number = dist.get_rank(), torch.zeros(1, device=device)
    for sender, receiver in pairs:
        if rank == sender:
            dist.send(number, dst=receiver, group=group)
        elif rank == receiver:
            dist.recv(number, src=sender, group=group)


def connected_group(
    name: str,
    groups: Sequence[Sequence[int]],
    pairs: Iterable[tuple[int, int]],
    *,
    device: torch.device,
    **options: Any,
) -> dist.ProcessGroup | None:
    """A process group for what ``name`` exchanges at any time, whose ``pairs`` are connected.

    None on a rank that is of none of ``groups``. ``options`` are :func:`create_exchange_group`'s.
    Collective over the world.
    """
    group = create_exchange_group(name, groups, messages=True, **options)
    connect(group, pairs, device=device)
    return group
