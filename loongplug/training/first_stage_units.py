"""Who loads and who encodes a microbatch's images when the encoder lies in the first stage."""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from loongplug.data.units import LoadedUnit, Unit


class FirstStageUnits:
    """The first rank of the first stage's TP group loads every unit; the whole group encodes it.

    The encoder is sharded over the group, so that all of it needs the pixels. Decoding them once
    and sending them costs a TP-th of the processor time and memory of decoding them on each rank,
    and what is sent (6 KB for 16 x 16 pixels of 2 frames) is little for what connects a TP group.

    Which samples have bad pixels is known to the loading rank alone. Where they may be left out,
    it tells all ranks of its replica, through ``replica``, without waiting: a rank of a later
    stage asks for a microbatch only once that has come through the stages before.
    """

    def __init__(
        self,
        *,
        encodes: bool,
        patch_dim: int,
        device: Callable[[], torch.device],
        replica: dist.ProcessGroup | None,
        channel: int,
    ) -> None:
        """``encodes``: this rank is of the first stage. ``replica``: a gloo group of the ranks of
        one model replica, None where no sample may be left out. ``channel`` tells apart several
        of these on one group.
        """
        self._encodes = encodes
        self._loads = encodes and parallel_state.get_tensor_model_parallel_rank() == 0
        self._patch_dim = patch_dim
        self._device = device
        self._replica = replica
        self._channel = channel
        self._sending: deque[dist.Work] = deque()

    def loads(self, index: int) -> bool:
        """The same rank loads all units."""
        return self._loads

    def deliver(self, unit: Unit, loaded: LoadedUnit | None) -> tuple[Tensor | None, set[int]]:
        """Collective: all ranks of the replica, as far as ``unit`` has images or videos."""
        bad = set() if loaded is None else set(loaded.bad)
        if self._replica is not None and unit.media:
            bad = self._told(unit, bad, self._replica)
        return (self._pixels(unit, loaded) if self._encodes else None), bad

    def _told(self, unit: Unit, bad: set[int], replica: dist.ProcessGroup) -> set[int]:
        """What the loading rank knows; it is the first of the replica."""
        first, *others = dist.get_process_group_ranks(replica)
        if not self._loads:
            flags = torch.empty(len(unit.media), dtype=torch.uint8)
            dist.recv(flags, src=first, group=replica, tag=self._channel)
            return {unit.samples[medium] for medium in flags.nonzero().flatten().tolist()}
        flags = torch.tensor([sample in bad for sample in unit.samples], dtype=torch.uint8)
        while self._sending and self._sending[0].is_completed():
            self._sending.popleft().wait()
        for rank in others:
            work = dist.isend(flags, dst=rank, group=replica, tag=self._channel)
            assert work is not None, "this rank is in the group"
            self._sending.append(work)
        return bad

    def _pixels(self, unit: Unit, loaded: LoadedUnit | None) -> Tensor:
        device = self._device()
        if loaded is None:
            pixels = torch.empty(unit.patches, self._patch_dim, device=device)
        else:
            pixels = loaded.pixels.to(device, non_blocking=True)
        group = parallel_state.get_tensor_model_parallel_group()
        if unit.media and dist.get_world_size(group) > 1:
            dist.broadcast(
                pixels, src=parallel_state.get_tensor_model_parallel_src_rank(), group=group
            )
        return pixels


def replica_group() -> dist.ProcessGroup | None:
    """A gloo group of this rank's model replica, None where the replica is one rank.

    Collective: the default group.
    """
    mine = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
    everyone: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(mine))
    if len(mine) == 1:
        return None
    replicas = sorted({tuple(ranks) for ranks in everyone})
    group, _ = dist.new_subgroups_by_enumeration(
        [list(ranks) for ranks in replicas], backend="gloo"
    )
    assert isinstance(group, dist.ProcessGroup), "every rank is in a replica"
    return group
