"""Tokens to context parallel ranks by how many keys they see: packs, whose segments differ."""

from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from loongplug.context.segments import Segments
from loongplug.context.token_split import ContextShard, TokenSplit, tokens_of_each

BLOCK = 128  # tokens: fewer make more and smaller tiles, more balance worse

# Blocks up to which a heap deals them out. It is more exact, which matters where blocks are few.
_FEW = 2048


@dataclass(frozen=True, eq=False)
class _Blocks:
    """A row cut into equally many blocks a rank, of sizes that differ by one token at most.

    ``bounds`` are int64 [blocks + 1]. The first ``longer`` blocks are those with one token more;
    their number is a multiple of the ranks', too, so that all ranks can have equally many tokens.
    """

    bounds: NDArray[np.int64]
    longer: int

    @classmethod
    def of(cls, each: int, *, cp: int, block: int) -> "_Blocks":
        """Blocks of at most ``block`` tokens, of a row with ``each`` tokens for a rank."""
        count = -(-each // block)
        size, more = divmod(each, count)
        sizes = np.full(cp * count, size, dtype=np.int64)
        sizes[: cp * more] += 1
        return cls(np.concatenate(([0], np.cumsum(sizes))), cp * more)


def balanced(segments: Segments, *, cp: int, block: int = BLOCK) -> TokenSplit:
    """A split that gives all ranks nearly equally many pairs of query and key.

    Blocks of neighbouring tokens go to ranks, those with most pairs first, each to the rank that
    has fewest so far and room for it (LPT). ``block`` is the most tokens of one. The result is a
    pure function of its arguments: all ranks come to the same one.
    """
    each = tokens_of_each(segments.length, cp=cp)
    padded = Segments.of(segments.lengths, padded_to=cp * each)
    blocks = _Blocks.of(each, cp=cp, block=block)
    pairs = np.diff(padded.pairs_before(blocks.bounds))
    deal = _by_heap if len(pairs) <= _FEW else _back_and_forth
    return _split(blocks.bounds, deal(pairs, cp=cp, longer=blocks.longer), cp=cp)


def _split(bounds: NDArray[np.int64], ranks: NDArray[np.int64], *, cp: int) -> TokenSplit:
    """The split of blocks between ``bounds`` that lie on ``ranks`` [blocks]."""
    changes = np.flatnonzero(np.diff(ranks)) + 1
    first = np.concatenate(([0], changes))  # block of each stretch
    starts, stops = bounds[first], bounds[np.append(changes, len(ranks))]
    of_rank = [np.flatnonzero(ranks[first] == rank) for rank in range(cp)]
    return TokenSplit(tuple(ContextShard(starts[mine], stops[mine]) for mine in of_rank))


def _by_heap(pairs: NDArray[np.int64], *, cp: int, longer: int) -> NDArray[np.int64]:
    """The rank of each block: that with the fewest pairs of those which have room for its size."""
    rooms = ([longer // cp] * cp, [(len(pairs) - longer) // cp] * cp)
    ranks = np.empty(len(pairs), dtype=np.int64)
    loads = [(0, rank) for rank in range(cp)]
    for block in _heaviest_first(pairs).tolist():
        room = rooms[block >= longer]
        full = []
        while not room[loads[0][1]]:
            full.append(heappop(loads))
        load, rank = loads[0]
        heapreplace(loads, (load + int(pairs[block]), rank))
        for entry in full:
            heappush(loads, entry)
        room[rank] -= 1
        ranks[block] = rank
    return ranks


def _back_and_forth(pairs: NDArray[np.int64], *, cp: int, longer: int) -> NDArray[np.int64]:
    """The rank of each block, dealt out in rounds to all ranks, every other round backwards."""
    order = np.concatenate(
        (_heaviest_first(pairs[:longer]), longer + _heaviest_first(pairs[longer:]))
    ).reshape(-1, cp)
    ranks = np.empty(len(pairs), dtype=np.int64)
    ranks[order[0::2]] = np.arange(cp)
    ranks[order[1::2]] = np.arange(cp)[::-1]
    return ranks


def _heaviest_first(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of blocks by their pairs; equal ones in their order, so on every machine alike."""
    return np.argsort(-pairs, kind="stable")
