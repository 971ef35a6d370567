"""The check that ranks which share a row have read it alike: its tokens, the sizes of its media."""

import json
import zlib
from collections.abc import Sequence
from itertools import zip_longest

from torch.distributed import Store

from loongplug.data.dataset import Sample
from loongplug.data.text_stream import ResumePoint
from loongplug.parallel.verdict import SharedFaultError

_AHEAD = 64  # microbatches that a rank may have read beyond those of the steps it is in


class SameRows:
    """Compares what ranks have read of each microbatch, in torchrun's store, and waits for nobody.

    The first rank to come leaves it there, the others find it. One that has read something else
    raises, and does not go on to what ranks do together. Those that have gone on agree, and end
    with it, as with any failure. It takes a call of the store for each microbatch; words of the
    last ``kept`` stay there. Where the store is gone, so is what started the ranks.
    """

    def __init__(self, store: Store | None, *, rank: int, kept: int) -> None:
        self._store = store
        self._rank = rank
        self._kept = kept + _AHEAD

    def __call__(
        self,
        stream: str,
        replica: int,
        index: int,
        samples: Sequence[Sample],
        begins: ResumePoint | None,
    ) -> None:
        """Compare a microbatch of a decoder replica with that of its other ranks.

        Of packs, what ``begins`` says of all rows before is compared with that of all replicas:
        each plans them all.

        Raises:
            SharedFaultError: with the first row that differs, and with two ranks.
        """
        mine = [_read(sample) for sample in samples]
        rank, theirs = self._first(f"{stream}/{replica}", index, mine)
        for place, (here, there) in enumerate(zip_longest(mine, theirs, fillvalue="nothing")):
            if here != there:
                sample = samples[min(place, len(samples) - 1)]
                where = sample.where if sample.bad is None else sample.bad.message
                raise _differs(f"{where}: {here} on rank {self._rank}, {there} on rank {rank}")
        if begins is not None:
            plan = [f"{hash(begins):x}"]  # of numbers alone: the same in every process
            rank, theirs = self._first(f"{stream} packs", index, plan)
            if theirs != plan:
                where = f"rows before {samples[0].where}"
                raise _differs(f"{where}: packed differently on ranks {self._rank} and {rank}")

    def _first(self, key: str, index: int, mine: list[str]) -> tuple[int, list[str]]:
        """The first rank to come here, and what it has read."""
        if self._store is None:
            return self._rank, mine
        try:
            value = json.dumps([self._rank, mine])
            rank, theirs = json.loads(self._store.compare_set(f"{key}/{index}", "", value))
            if rank == self._rank:
                self._store.delete_key(f"{key}/{index - self._kept}")
        except RuntimeError:  # it is gone
            self._store, rank, theirs = None, self._rank, mine
        return rank, theirs


def _read(sample: Sample) -> str:
    if sample.bad is not None:
        return f"left out ({sample.bad.kind})"
    grids = " ".join("x".join(map(str, grid)) for grid in sample.grids) or "none"
    digest = zlib.crc32(sample.input_ids.tobytes())
    return f"{len(sample)} tokens (digest {digest:08x}), sizes of media {grids}"


def _differs(what: str) -> SharedFaultError:
    return SharedFaultError(
        f"{what}. Ranks have to read the same of a row: give all of them the same media files.",
        fault="rows that ranks read differently",
        knows=0,
    )
