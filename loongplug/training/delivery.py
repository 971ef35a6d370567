"""What ranks tell each other of a microbatch's data: its media, bad samples, rows that differ."""

import json
import re
import zlib
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import zip_longest
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

from loongplug.data.loader import Heard
from loongplug.data.media_loader import CodedMedia
from loongplug.data.microbatch import MediaToCome
from loongplug.data.planned_media import MediaBatch, PlannedShare, PlannedUnit
from loongplug.data.sample import Sample
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.parallel.failure import SharedFaultError
from loongplug.parallel.rendezvous import comes
from loongplug.platform.devices import to_device

_COMPARED = 1000  # microbatches of a replica: more than a rank is ahead of another


@dataclass(frozen=True, kw_only=True, eq=False)
class News:
    """Word of which samples have bad media, from the rank that loads these to all who ask.

    It lies in the ``store`` of the default group, under the encoder's name, the decoder's replica,
    the microbatch's index there, and who loads the share. What is older than ``recent`` shares of
    the replica's is taken out by who wrote it: all have heard of it by then.
    """

    store: Store
    encoder: str
    recent: int
    seconds: float
    recorder: Recorder = NOTHING
    _told: dict[int, deque[str]] = field(default_factory=lambda: defaultdict(deque))

    def tell(self, replica: int, index: int, bad: Collection[int]) -> None:
        """Tell which samples of a microbatch's share, which this rank has loaded, are ``bad``."""
        told, key = self._told[replica], self._key(replica, index, dist.get_rank())
        told.append(key)
        self.store.set(key, json.dumps(sorted(bad)))
        if len(told) > self.recent:
            self.store.delete_key(told.popleft())

    def heard(self, replica: int, index: int, loader: int) -> set[int]:
        """The bad samples of the share that ``loader`` loads. Waits until it has."""
        key = self._key(replica, index, loader)
        with self.recorder.span("data", "word of media"):
            came = comes(self.store, key, seconds=self.seconds, first=0.0005, longest=0.05)
        if not came:
            raise RuntimeError(f"timed out waiting for what rank {loader} says of its media")
        return set(json.loads(self.store.get(key)))

    def _key(self, replica: int, index: int, loader: int) -> str:
        return f"{self.encoder}/{replica}/{index}/{loader}"


@dataclass(kw_only=True, eq=False)
class LoadedShare:
    """A share on the rank that loads it, from the first question on until all media are taken."""

    planned: PlannedShare
    tell: Callable[[set[int]], None] | None  # is told of bad samples
    keeps: bool  # media are taken again and again
    recorder: Recorder = NOTHING
    _rows: Tensor | None = None
    _bad: set[int] | None = None

    def __post_init__(self) -> None:
        self._left = inf if self.keeps else len(self.planned.media.media)

    def bad(self) -> set[int]:
        """Which samples have bad media. There are some media."""
        if self._bad is None:
            assert self.planned.load is not None, "another rank loads it"
            noted = self.recorder is not NOTHING
            with self.recorder.span("data", "media") if noted else nullcontext():
                loaded = self.planned.load()
            self._rows, self._bad = loaded.rows, set(loaded.bad)
            if self.tell is not None:
                self.tell(self._bad)
        return self._bad

    def rows(self, numbers: range) -> Tensor:
        """The loaded rows of these of its media, of which there are some."""
        self.bad()
        assert self._rows is not None, "each medium is taken once"
        media = self.planned.media
        first = media.part(range(numbers.start)).loaded_rows
        found = self._rows[first : first + media.part(numbers).loaded_rows]
        self._left -= len(numbers)
        if not self._left:
            self._rows = None
        return found


@dataclass(eq=False)
class ReplicaDelivery:
    """A :data:`Delivery`: the first rank of an encoder's replica loads for it, all get the rows.

    It does so at the pass that encodes them, for its media alone: passes are in one order on a
    replica's ranks. What is sent is little (768 bytes for 16 x 16 pixels of an image).

    Which samples have bad media is known to the loading rank alone, once it has loaded them. Where
    they may be left out, those who train on the samples read it in the ``news`` when the
    microbatch's features are due.
    """

    replicas: Sequence[Sequence[int]]  # the ranks of each encoder replica; a share names one
    group: dist.ProcessGroup | None  # of the one that this rank is of, where it has several ranks
    _: KW_ONLY
    rank: int
    row_values: int
    coded: CodedMedia | None  # None: the encoder takes neither images nor videos
    device: torch.device
    news: News | None  # None: no sample may be left out, or nobody else needs to know
    keeps: bool = False  # media are taken again and again
    recorder: Recorder = NOTHING  # of how long media are waited for

    def __call__(self, planned: PlannedUnit) -> tuple[MediaToCome | None, list[Heard]]:
        mine, heard = None, list[Heard]()
        named = planned.replica, planned.media.index
        for each in planned.shares:
            ranks, media, loaded = self.replicas[each.share.encoder_replica], each.media, None
            if each.load is not None:
                tell = None if self.news is None else partial(self.news.tell, *named)
                loaded = LoadedShare(
                    planned=each, tell=tell, keeps=self.keeps, recorder=self.recorder
                )
            if self.rank in ranks:
                assert mine is None, "a replica has one share of a unit"
                load = partial(self._loaded, media, loaded)
                mine = media.to_come(load, partial(self._decoded, media))
            if media.media and loaded is not None:
                heard.append(loaded.bad)
            elif media.media and self.news is not None:
                heard.append(partial(self.news.heard, *named, ranks[0]))
        return mine, heard

    def _coded(self, media: MediaBatch) -> CodedMedia | None:
        return self.coded if media.coded else None

    def _decoded(self, share: MediaBatch, numbers: range, rows: Tensor) -> Tensor:
        coded, media = self._coded(share), share.part(numbers)
        return rows if coded is None else coded.decoded(rows, media.extents)

    def _loaded(self, share: MediaBatch, loaded: LoadedShare | None, numbers: range) -> Tensor:
        """What is loaded of these of a share's media. Collective: the replica."""
        media = share.part(numbers)
        if loaded is not None and numbers:
            # Pinned by the background processes' thread; where there are none, only here.
            rows = to_device(loaded.rows(numbers), self.device)
        else:
            width, kind = self.row_values, torch.float32
            if (coded := self._coded(share)) is not None:
                width, kind = coded.width(self.row_values), torch.uint8
            rows = torch.empty(media.loaded_rows, width, dtype=kind, device=self.device)
        several = self.group is not None and dist.get_world_size(self.group) > 1
        assert several or loaded is not None or not numbers, "another rank loads it"
        if numbers and several:
            dist.broadcast(rows, group=self.group, group_src=0)
        return rows


def loaded_elsewhere(
    news: News, pieces: Sequence[tuple[int, range | None]], planned: PlannedUnit
) -> tuple[None, list[Heard]]:
    """A :data:`Delivery` of what encoders elsewhere load: pieces' loading ranks and samples."""
    media = planned.media
    return None, [
        partial(news.heard, planned.replica, media.index, loader)
        for loader, samples in pieces
        if any(samples is None or each in samples for each in media.samples)
    ]


def store_of_news() -> Store:
    """The default group's, with keys of this run: a process may make another. Every rank asks."""
    store = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"news/{store.add(f'news/{dist.get_rank()}', 1)}", store)


class SameRows:
    """Compares what ranks have read of each microbatch, in a store, and waits for nobody.

    The first rank to come leaves it there, the others find it. One that has read something else
    raises, and does not go on to what ranks do together. Those that have gone on agree, and end
    with it, as with any failure. It takes a call of the store for each microbatch.
    """

    def __init__(self, args: Namespace, *, store: Store | None) -> None:
        """``store``: None where ranks do not meet in one, and nothing is compared."""
        self._store = store
        self._rank, self._args = args.rank, args
        self._asked = 0  # how often what all ranks have

    def all_have(self, has: bool) -> bool:
        """Whether each rank has what it is asked for. Every rank asks, and waits for the others.

        Where they do not meet in a store, ranks are of one machine: the answer is the rank's own.
        """
        if self._store is None:
            return has
        self._asked += 1
        key = f"all have {self._asked}"
        self._store.add(f"{key}: without", not has)
        if self._store.add(f"{key}: asked", 1) == self._args.ranks:
            self._store.set(f"{key}: known", "")
        minutes = self._args.distributed_timeout_minutes
        comes(self._store, f"{key}: known", seconds=60.0 * minutes)
        return self._store.add(f"{key}: without", 0) == 0

    def __call__(
        self, stream: str, replica: int, index: int, samples: Sequence[Sample], begins: object
    ) -> None:
        """Compare a decoder replica's microbatch; of a pack, its place with all replicas', too.

        Each of these plans the packs of all. Raises SharedFaultError with the first row that
        differs, and two ranks.
        """
        self._compare(f"{stream}/{replica}", index, [_read(each) for each in samples], samples)
        if begins is not None:  # made of integers, whose hash is the same in every process
            place = f"in a pack behind rows with digest {hash(begins) & 0xFFFFFFFF:08x}"
            self._compare(f"{stream}/packs", index, [place], samples)

    def _compare(self, key: str, index: int, mine: list[str], samples: Sequence[Sample]) -> None:
        if self._store is None:
            return
        try:
            value = json.dumps([self._rank, mine])
            rank, theirs = json.loads(self._store.compare_set(f"{key}/{index}", "", value))
            if rank == self._rank:
                self._store.delete_key(f"{key}/{index - _COMPARED}")
        except RuntimeError:  # the store is gone: so is what started the ranks
            self._store = None
            return
        for place, (here, there) in enumerate(zip_longest(mine, theirs, fillvalue="nothing")):
            if here != there:
                sample = samples[min(place, len(samples) - 1)]
                where = sample.where if sample.bad is None else sample.bad.message
                where = re.sub(r"(?s)^(.{150}).{6,}(.{130})$", r"\1 ... \2", where)
                said = (
                    f"{where}: {_said(here)} on rank {self._rank}, {_said(there)} on rank {rank}. "
                    "Ranks have to read the same of a row: give all of them the same media files."
                )
                raise SharedFaultError(said, turn=0)


def _read(sample: Sample) -> str:
    """Tokens, and a digest of them and the sizes of media: short, since the store keeps many."""
    if sample.bad is not None:
        return f"left out ({sample.bad.kind})"
    sizes = str([medium.grid for medium in sample.extent.media]).encode()
    return f"{len(sample)}:{zlib.crc32(sizes, zlib.crc32(sample.input_ids.tobytes())):08x}"


def _said(read: str) -> str:
    tokens, _, digest = read.partition(":")
    return f"{tokens} tokens (digest {digest}, with sizes of media)" if digest else read
