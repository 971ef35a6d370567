"""How a microbatch's media come from the rank that loads them to those that encode them."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from loongplug.data.source import PlannedMicrobatch, PlannedUnit
from loongplug.data.units import LoadedUnit, MediaBatch
from loongplug.platform.transfers import to_device


def loaded_replicas(replicas: Sequence[Sequence[int]], *, rank: int) -> tuple[int, ...]:
    """The encoder replicas, given by their ranks, whose media ``rank`` loads: it is their first."""
    return tuple(number for number, ranks in enumerate(replicas) if ranks[0] == rank)


@dataclass(eq=False)
class ReplicaDelivery:
    """The first rank of an encoder's replica loads for it; all ranks of the replica get the rows.

    An encoder that is sharded over the replica, or encodes the same on all of it, needs the rows
    on each rank. Decoding them once and sending them costs a share of the processor time and
    memory of decoding them everywhere, and what is sent (6 KB for 16 x 16 pixels of 2 frames) is
    little for what connects such a replica. No other rank ever has them.

    Which samples have bad media is known to the loading rank alone. Where they may be left out,
    it tells all ranks of its model replica, through ``news``, without waiting: a rank of a later
    stage may ask for a microbatch only once that has come through the stages before.
    """

    replicas: Sequence[Sequence[int]]  # the ranks of each encoder replica of this model replica
    group: dist.ProcessGroup | None  # of the one that this rank is of, None where it is of none
    _: KW_ONLY
    row_values: int
    device: torch.device
    news: dist.ProcessGroup | None  # gloo, of the model replica; None: no sample may be left out
    channel: int  # tells apart several of these on one group
    _sending: deque[dist.Work] = field(default_factory=deque, init=False)

    def __call__(self, planned: PlannedUnit) -> tuple[Tensor | None, set[int]]:
        """The unit's rows, None where this rank does not encode it, and the bad samples' numbers.

        Collective: all ranks of the model replica, as far as ``planned`` has media.
        """
        ranks, media = self.replicas[planned.encoder_replica], planned.media
        loaded = None if planned.load is None else planned.load()
        bad = set() if loaded is None else set(loaded.bad)
        if self.news is not None and media.media:
            bad = self._told(media, bad, self.news, first=ranks[0])
        encodes = dist.get_rank() in ranks
        return (self._rows(media, loaded) if encodes else None), bad

    def _told(
        self, media: MediaBatch, bad: set[int], news: dist.ProcessGroup, *, first: int
    ) -> set[int]:
        """What the loading rank, ``first``, knows."""
        if first != dist.get_rank():
            flags = torch.empty(len(media.media), dtype=torch.uint8)
            dist.recv(flags, src=first, group=news, tag=self.channel)
            return {media.samples[medium] for medium in flags.nonzero().flatten().tolist()}
        flags = torch.tensor([sample in bad for sample in media.samples], dtype=torch.uint8)
        while self._sending and self._sending[0].is_completed():
            self._sending.popleft().wait()
        for rank in dist.get_process_group_ranks(news):
            if rank != first:
                work = dist.isend(flags, dst=rank, group=news, tag=self.channel)
                assert work is not None, "this rank is in the group"
                self._sending.append(work)
        return bad

    def _rows(self, media: MediaBatch, loaded: LoadedUnit | None) -> Tensor:
        if loaded is None:
            rows = torch.empty(media.rows, self.row_values, device=self.device)
        else:
            # Pinned by the background processes' thread; where there are none, only here.
            rows = to_device(loaded.rows, self.device)
        assert self.group is not None, "this rank encodes"
        if media.media and dist.get_world_size(self.group) > 1:
            dist.broadcast(rows, group=self.group, group_src=0)
        return rows


def deliver(
    deliveries: Mapping[str, ReplicaDelivery], planned: PlannedMicrobatch
) -> tuple[dict[str, Tensor], set[int]]:
    """A :data:`~loongplug.data.loader.Delivery` of each encoder's units, in the encoders' order.

    Collective as each of ``deliveries`` is.
    """
    rows: dict[str, Tensor] = {}
    bad: set[int] = set()
    for name, delivery in deliveries.items():
        found, theirs = delivery(planned.units[name])
        bad |= theirs
        if found is not None:
            rows[name] = found
    return rows, bad


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
