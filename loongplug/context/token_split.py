"""Which tokens of a row each context parallel rank holds."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class ContextShard:
    """The tokens of one rank: stretches of neighbouring places, int64 [stretches], ascending.

    A rank holds its tokens in the order of their places. ``stops`` are the first places behind
    the stretches. Between two stretches is at least one token of another rank.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def of(cls, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> "ContextShard":
        """The part of stretches that ascend, and that may be empty or touch each other."""
        some = stops > starts
        starts, stops = starts[some], stops[some]
        apart = starts[1:] > stops[:-1]
        return cls(starts[np.append(True, apart)], stops[np.append(apart, True)])

    @classmethod
    def whole(cls, length: int) -> "ContextShard":
        """All tokens of a row of ``length``."""
        return cls(np.array([0]), np.array([length]))

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where each stretch begins among the rank's tokens, and their number; [stretches + 1]."""
        return np.concatenate(([0], np.cumsum(self.stops - self.starts)))

    @property
    def tokens(self) -> int:
        """How many tokens the rank holds."""
        return int(self.offsets[-1])

    @property
    def places(self) -> NDArray[np.int64]:
        """The place of each token in the row, int64 [tokens]."""
        shifts = np.repeat(self.starts - self.offsets[:-1], self.stops - self.starts)
        return shifts + np.arange(self.tokens)

    def chunks(self, number: int) -> tuple["ContextShard", ...]:
        """The rank's tokens in so many equal chunks, as they follow each other on the rank."""
        assert self.tokens % number == 0, (self.tokens, number)
        size, before = self.tokens // number, self.offsets[:-1]
        cuts = np.arange(number + 1)[:, None] * size - before  # [number + 1, stretches]
        cuts = self.starts + np.clip(cuts, 0, self.stops - self.starts)
        return tuple(ContextShard.of(*pair) for pair in pairwise(cuts))

    def before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of the rank's tokens lie before each of these places of the row; same shape."""
        stretch = np.searchsorted(self.starts, places, side="right") - 1
        inside = np.minimum(places, self.stops[stretch]) - self.starts[stretch]
        return np.where(stretch < 0, 0, self.offsets[stretch] + inside)

    def holds(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the rank holds each of these places of the row; same shape."""
        return self.before(places + 1) > self.before(places)


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """A row's tokens by context parallel rank: each place in one part, equally many in each.

    Where ranks do not divide the row's tokens, the row is made longer by fewer than one token a
    rank: ``length`` is that of the padded row, and its last places hold padding.
    """

    parts: tuple[ContextShard, ...]

    @classmethod
    def whole(cls, length: int) -> "TokenSplit":
        """A row of ``length`` that one rank holds."""
        return cls((ContextShard.whole(length),))

    @property
    def length(self) -> int:
        """Tokens of the padded row."""
        return sum(part.tokens for part in self.parts)

    @property
    def in_equal_chunks(self) -> bool:
        """Whether it is a zigzag of which all chunks have equally many tokens."""
        cp, length = len(self.parts), self.length
        return length % (2 * cp) == 0 and all(
            np.array_equal(mine.starts, theirs.starts) and np.array_equal(mine.stops, theirs.stops)
            for mine, theirs in zip(self.parts, zigzag(length, cp=cp).parts, strict=True)
        )

    @property
    def order(self) -> NDArray[np.int64]:
        """The places of the row's tokens, part after part; int64 [length]."""
        return np.concatenate([part.places for part in self.parts])


@dataclass(frozen=True, eq=False)
class OwnPart:
    """What one rank holds of each row: the part of its number in a split."""

    split: TokenSplit
    rank: int  # in the context parallel group

    @property
    def part(self) -> ContextShard:
        """Its stretches of the row."""
        return self.split.parts[self.rank]

    def column(self, place: int) -> int | None:
        """Where among the rank's tokens a place of the row is; None if another rank holds it."""
        places = np.array([place])
        return int(self.part.before(places)[0]) if self.part.holds(places)[0] else None


def tokens_of_each(tokens: int, *, cp: int) -> int:
    """How many tokens each of ``cp`` ranks holds of a row of ``tokens``, padding included."""
    return -(-tokens // cp)


def zigzag(tokens: int, *, cp: int) -> TokenSplit:
    """Two chunks of the row for each rank, one from the front and one from the back.

    Rank r holds chunk r and chunk 2 cp - 1 - r, which gives all ranks equally many pairs of a row
    that is one causal segment. A chunk of the back is one token longer where a rank's tokens are
    odd in number.
    """
    each = tokens_of_each(tokens, cp=cp)
    front, back = each // 2, each - each // 2
    ranks = np.arange(cp)
    starts = np.stack((ranks * front, cp * front + (cp - 1 - ranks) * back), axis=1)
    stops = starts + np.array([front, back])
    return TokenSplit(tuple(ContextShard.of(*pair) for pair in zip(starts, stops, strict=True)))
