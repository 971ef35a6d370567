"""How a microbatch's media come from the rank that loads them to those that encode them."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.data.media import CodedMedia
from loongplug.data.microbatch import MediaInput
from loongplug.data.source import PlannedMicrobatch, PlannedUnit
from loongplug.data.units import LoadedUnit, MediaBatch
from loongplug.hetero.sends import Sends
from loongplug.parallel.states import decoder_layout
from loongplug.platform.transfers import to_device


def loaded_replicas(replicas: Sequence[Sequence[int]], *, rank: int) -> tuple[int, ...]:
    """The encoder replicas, given by their ranks, whose media ``rank`` loads: it is their first."""
    return tuple(number for number, ranks in enumerate(replicas) if ranks[0] == rank)


# One encoder's unit: what this rank encodes of it, None where that is nothing, and the bad samples.
Delivery = Callable[[PlannedUnit], tuple[MediaInput | None, set[int]]]


@dataclass(eq=False, kw_only=True)
class News:
    """Word of which samples have bad media, known to the rank that loads these, to all ``hearers``.

    These are what trains on the samples' text: the ranks of a decoder replica.
    """

    group: dist.ProcessGroup  # gloo; the hearers and who loads are among its ranks
    hearers: Sequence[int]
    channel: int  # tells apart several of these on one group
    # How many microbatches' word may be on its way. Of those before, all must have heard by then:
    # waiting for them must not hold up who they wait for.
    recent: int
    _sends: Sends = field(init=False)
    _told: int = field(default=0, init=False)  # microbatches

    def __post_init__(self) -> None:
        self._sends = Sends(most=self.recent)

    def told(self, samples: Sequence[int], bad: Container[int], *, first: int) -> set[int]:
        """Which of ``samples``, one for each medium, are ``bad``, as the loading rank knows it.

        That rank, ``first``, does not wait for the others: a rank of a later stage may ask for a
        microbatch only once that has come through the stages before. Collective: ``first`` and the
        hearers, where there are media; another rank hears nothing.
        """
        rank = dist.get_rank()
        if not samples or rank not in (first, *self.hearers):
            return set()
        if rank != first:
            flags = torch.empty(len(samples), dtype=torch.uint8)
            dist.recv(flags, src=first, group=self.group, tag=self.channel)
            return {samples[medium] for medium in flags.nonzero().flatten().tolist()}
        flags = torch.tensor([sample in bad for sample in samples], dtype=torch.uint8)
        for other in self.hearers:
            if other != first:
                work = dist.isend(flags, dst=other, group=self.group, tag=self.channel)
                self._sends.add(work, flags, microbatch=self._told)
        self._told += 1
        return {sample for sample in samples if sample in bad}


@dataclass(eq=False)
class ReplicaDelivery:
    """The first rank of an encoder's replica loads for it; all ranks of the replica get the rows.

    An encoder that is sharded over the replica, or encodes the same on all of it, needs the rows
    on each rank. Decoding them once and sending them costs a share of the processor time and
    memory of decoding them everywhere, and what is sent (768 bytes for 16 x 16 pixels of an image,
    which become values on each rank's device) is little for what connects such a replica. No other
    rank ever has them.

    Which samples have bad media is known to the loading rank alone. Where they may be left out,
    it tells those who train on the samples, through ``news``.
    """

    replicas: Sequence[Sequence[int]]  # the ranks of each encoder replica; a share names one
    group: dist.ProcessGroup | None  # of the one that this rank is of, None where it is of none
    _: KW_ONLY
    row_values: int
    coded: CodedMedia | None  # None: the encoder takes neither images nor videos
    device: torch.device
    news: News | None  # None: no sample may be left out, or nobody else needs to know

    def __call__(self, planned: PlannedUnit) -> tuple[MediaInput | None, set[int]]:
        """See :data:`Delivery`. Collective as the news of each share, and the replicas."""
        mine, bad = None, set()
        for each in planned.shares:
            ranks, media = self.replicas[each.share.encoder_replica], each.media
            loaded = None if each.load is None else each.load()
            theirs = set() if loaded is None else set(loaded.bad)
            if self.news is not None:
                theirs = self.news.told(media.samples, theirs, first=ranks[0])
            bad |= theirs
            if dist.get_rank() in ranks:
                assert mine is None, "a replica has one share of a unit"
                mine = media.input(self._rows(media, loaded))
        return mine, bad

    def _rows(self, media: MediaBatch, loaded: LoadedUnit | None) -> Tensor:
        coded = self.coded if media.coded else None
        if loaded is None:
            width, kind = self.row_values, torch.float32
            if coded is not None:
                width, kind = coded.width(self.row_values), torch.uint8
            rows = torch.empty(media.loaded_rows, width, dtype=kind, device=self.device)
        else:
            # Pinned by the background processes' thread; where there are none, only here.
            rows = to_device(loaded.rows, self.device)
        assert self.group is not None, "this rank encodes"
        if media.media and dist.get_world_size(self.group) > 1:
            dist.broadcast(rows, group=self.group, group_src=0)
        return rows if coded is None else coded.decoded(rows, media.media, media.grids)


@dataclass(frozen=True, kw_only=True)
class LoadedElsewhere:
    """A unit that encoders on ranks of their own load and encode, piece by piece.

    ``pieces`` are the loading rank and the samples of each piece of this rank's microbatches, None
    for all samples.
    """

    pieces: Sequence[tuple[int, range | None]]
    news: News

    def __call__(self, planned: PlannedUnit) -> tuple[None, set[int]]:
        """See :data:`Delivery`. Collective as the news of each piece."""
        bad: set[int] = set()
        for first, samples in self.pieces:
            own = [each for each in planned.media.samples if samples is None or each in samples]
            bad |= self.news.told(own, (), first=first)
        return None, bad


def deliver(
    deliveries: Mapping[str, Delivery], planned: PlannedMicrobatch
) -> tuple[dict[str, MediaInput], set[int]]:
    """A :data:`~loongplug.data.loader.Delivery` of each encoder's units, in the encoders' order.

    Collective as each of ``deliveries`` is.
    """
    media: dict[str, MediaInput] = {}
    bad: set[int] = set()
    for name, delivery in deliveries.items():
        found, theirs = delivery(planned.units[name])
        bad |= theirs
        if found is not None:
            media[name] = found
    return media, bad


def replica_group() -> dist.ProcessGroup | None:
    """A gloo group of this rank's model replica, None where the replica is one rank.

    Collective: the default group.
    """
    replicas = decoder_layout().groups("tp_cp_pp")
    if len(replicas[0]) == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration(replicas, backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank is in a replica"
    return group


def group_of_all() -> dist.ProcessGroup:
    """A gloo group of all ranks. Collective: the default group."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group
