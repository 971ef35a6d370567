"""Process groups for what modules exchange, and connections that are there before a step."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]
from megatron.core import parallel_state

from loongplug.platform import current_platform

# Of a GPU's some 130 multiprocessors, those that a message may hold until its other end comes. NCCL
# would take 32; several messages wait at a time.
_CTAS_OF_A_MESSAGE = 4


def create_exchange_group(
    name: str,
    groups: Sequence[Sequence[int]],
    *,
    options_of: str,
    pairs: Iterable[tuple[int, int]] | None = None,
    timeout_minutes: float = 30,
    nccl_config_path: str | None = None,
) -> dist.ProcessGroup | None:
    """A process group for what ``name`` exchanges; None on a rank that is of none of ``groups``.

    Collective over the world: every rank calls this in the same order with the same arguments.
    ``groups`` have no rank in common. With ``pairs``, ranks send each other messages there, at any
    time, and these are connected. NCCL's options are those of the groups that Megatron calls
    ``options_of``; what the user leaves open of them is ours. Like the groups of a state, this one
    lives as long as the default group, and Megatron's change of the timeout after the first step
    reaches it.
    """
    # Else two ranks' messages would go through the one communicator of the whole group.
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    assert bound is None, "communicators are made at the first message"
    options = None
    if dist.get_backend() == "nccl" and dist.is_nccl_available():
        # Of the pool of streams that Megatron's groups leave alone: no two of ours share one.
        chosen: dict[str, Any] = {"is_high_priority_stream": True}
        chosen |= {} if pairs is None else {"max_ctas": _CTAS_OF_A_MESSAGE}
        if nccl_config_path is not None:
            chosen |= yaml.safe_load(Path(nccl_config_path).read_text()).get(options_of) or {}
        options = parallel_state.get_nccl_options(options_of, {options_of: chosen})
    mine = None
    for ranks in groups:
        made = parallel_state.create_group(
            list(ranks),
            timeout=timedelta(minutes=timeout_minutes),
            pg_options=options,
            group_desc=f"EXCHANGE_OF_{name.upper()}_GROUP",
        )
        if dist.get_rank() in ranks:
            mine = made
    if pairs is not None:
        connect(mine, pairs, device=current_platform().device)
    return mine


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
