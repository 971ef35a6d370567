"""Connections between two ranks, made before they are needed."""

from collections.abc import Iterable

import torch
import torch.distributed as dist


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
