"""Who loads a microbatch's images, and how their pixels come to the ranks that encode them."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from loongplug.data.units import LoadedUnit, MediaBatch
from loongplug.hetero.balance import Balance
from loongplug.hetero.engine import EncoderPlace
from loongplug.platform.transfers import to_device
from loongplug.training.step_sizes import UnitSteps


class AssignedUnits:
    """The first rank of the group that encodes a unit loads it; the whole group gets the pixels.

    An encoder that is sharded over the group, or encodes the unit on all of it, needs the pixels
    on each rank. Decoding them once and sending them costs a share of the processor time and
    memory of decoding them everywhere, and what is sent (6 KB for 16 x 16 pixels of 2 frames) is
    little for what connects such a group. No other rank ever has them.

    Which samples have bad pixels is known to the loading rank alone. Where they may be left out,
    it tells all ranks of its replica, through ``replica``, without waiting: a rank of a later
    stage may ask for a microbatch only once that has come through the stages before.
    """

    def __init__(
        self,
        place: EncoderPlace,
        *,
        balance: Balance | None,
        steps: UnitSteps,
        patch_dim: int,
        device: Callable[[], torch.device],
        replica: dist.ProcessGroup | None,
        channel: int,
    ) -> None:
        """``balance``: how the units of a step are spread, None for each group in turn.
        ``steps``: the loader's. ``replica``: a gloo group of the ranks of one model replica, None
        where no sample may be left out. ``channel`` tells apart several of these on one group.
        """
        self._place = place
        self._balance = balance
        self._steps = steps
        self._patch_dim = patch_dim
        self._device = device
        self._replica = replica
        self._channel = channel
        self._sending: deque[dist.Work] = deque()

    def block(self, first: int) -> int:
        """A step's units where they are balanced; blocks then begin where steps do."""
        if self._balance is None:
            return 1
        number, units = self._steps.place(first)
        assert number == 0, "a block is a step"
        return units

    def owners(self, units: Sequence[MediaBatch]) -> Sequence[int]:
        """Which encoder replica encodes each."""
        edge = self._place.edge
        if self._balance is None:
            return [edge.owner(self._steps.place(unit.index)[0]) for unit in units]
        return self._balance.owners([unit.grids for unit in units], replicas=len(edge.replicas))

    def loads(self, unit: MediaBatch) -> bool:
        """Whether this rank is the first of the unit's group."""
        return self._ranks(unit)[0] == dist.get_rank()

    def deliver(
        self, unit: MediaBatch, loaded: LoadedUnit | None
    ) -> tuple[Tensor | None, set[int]]:
        """Collective: all ranks of the replica, as far as ``unit`` has images or videos."""
        bad = set() if loaded is None else set(loaded.bad)
        if self._replica is not None and unit.media:
            bad = self._told(unit, bad, self._replica)
        encodes = dist.get_rank() in self._ranks(unit)
        return (self._pixels(unit, loaded) if encodes else None), bad

    def _ranks(self, unit: MediaBatch) -> tuple[int, ...]:
        return self._place.edge.replicas[unit.owner]

    def _told(self, unit: MediaBatch, bad: set[int], replica: dist.ProcessGroup) -> set[int]:
        """What the loading rank knows."""
        first = self._ranks(unit)[0]
        if first != dist.get_rank():
            flags = torch.empty(len(unit.media), dtype=torch.uint8)
            dist.recv(flags, src=first, group=replica, tag=self._channel)
            return {unit.samples[medium] for medium in flags.nonzero().flatten().tolist()}
        flags = torch.tensor([sample in bad for sample in unit.samples], dtype=torch.uint8)
        while self._sending and self._sending[0].is_completed():
            self._sending.popleft().wait()
        for rank in dist.get_process_group_ranks(replica):
            if rank != first:
                work = dist.isend(flags, dst=rank, group=replica, tag=self._channel)
                assert work is not None, "this rank is in the group"
                self._sending.append(work)
        return bad

    def _pixels(self, unit: MediaBatch, loaded: LoadedUnit | None) -> Tensor:
        device = self._device()
        if loaded is None:
            pixels = torch.empty(unit.patches, self._patch_dim, device=device)
        else:
            # Pinned by the background processes' thread; where there are none, only here.
            pixels = to_device(loaded.pixels, device)
        group = self._place.group_ranks
        assert group is not None, "this rank encodes"
        if unit.media and dist.get_world_size(group) > 1:
            dist.broadcast(pixels, group=group, group_src=0)
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
