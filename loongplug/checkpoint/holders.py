"""Which ranks hold which piece of the model, known to all of them alike."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from loongplug.checkpoint.owned import Owned, Piece, sort_key
from loongplug.platform import current_platform

Holders = dict[Piece, tuple[int, ...]]


def all_holders(owned: Sequence[Owned]) -> tuple[Holders, dict[Piece, torch.dtype]]:
    """The ranks that hold each piece, ascending, and the first of them's dtype of it.

    Pieces come in one order on every rank. Collective: the default group, when there is one.
    """
    mine = [(own.piece, own.parameter.dtype) for own in owned]
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    ranks: dict[Piece, list[int]] = {}
    dtypes: dict[Piece, torch.dtype] = {}
    for rank, pieces in enumerate(everyone):
        for piece, dtype in pieces:
            ranks.setdefault(piece, []).append(rank)
            dtypes.setdefault(piece, dtype)
    ordered = sorted(ranks, key=sort_key)
    return {piece: tuple(dict.fromkeys(ranks[piece])) for piece in ordered}, dtypes


@contextmanager
def replica_groups(holders: Holders) -> Iterator[Mapping[tuple[int, ...], Any]]:
    """A process group for every set of several ranks that hold the same piece.

    The groups last as long as the context and have the default group's time limit. Collective:
    the default group.
    """
    sets = [ranks for ranks in dict.fromkeys(holders.values()) if len(ranks) > 1]
    groups = {ranks: dist.new_group(list(ranks), timeout=_time_limit()) for ranks in sets}
    try:
        yield groups
    finally:
        for ranks, group in groups.items():
            if dist.get_rank() in ranks:
                dist.destroy_process_group(group)


def _time_limit() -> timedelta | None:
    """``--distributed-timeout-minutes``, which torch does not hand on to new groups."""
    world = dist.group.WORLD
    assert world is not None
    options = getattr(world._get_backend(current_platform().device), "options", None)
    limit: timedelta | None = getattr(options, "_timeout", None)
    return limit


def own_rank() -> int:
    """This process's global rank; 0 where nothing is distributed."""
    return dist.get_rank() if dist.is_initialized() else 0
