"""What one microbatch holds when it reaches the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loongplug.context.token_split import OwnPart, TokenSplit
from loongplug.data.sample import Grid

if TYPE_CHECKING:
    from torch import Tensor


def _as_loaded(loaded: Tensor) -> Tensor:
    return loaded


@dataclass(frozen=True)
class MediaInput:
    """A microbatch's media of one encoder (a *unit*), in the order of their tokens in the text.

    ``loaded`` is what lies in memory, on the encoder's device: :attr:`rows`, or what ``decode``
    makes them of. ``grids`` are the rows of each medium as time, height, width, [media, 3] int64 on
    the host, in patches or, for a sound, (1, 1, frames); an image's time is 1, or the number of its
    tiles. A microbatch without media has zero rows in both, and takes part in everything.
    """

    loaded: Tensor
    grids: Tensor
    decode: Callable[[Tensor], Tensor] = _as_loaded

    @property
    def rows(self) -> Tensor:
        """What the encoder takes one by one, [rows, values of a row] float32, made at each call."""
        return self.rows_of(self.loaded)

    @property
    def rows_of(self) -> Callable[[Tensor], Tensor]:
        """Makes :attr:`rows` of what is loaded, and holds none of it."""
        decode, expected = self.decode, int(self.grids.prod(dim=-1).sum())

        def made(loaded: Tensor) -> Tensor:
            rows = decode(loaded)
            assert rows.shape[0] == expected, (rows.shape, expected)
            return rows

        return made

    def taken(self) -> MediaInput:
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaToCome:
    """Media that come when a pass takes them, and that nothing else holds then.

    They have ``numbers`` among those that ``load`` knows, which gives :attr:`MediaInput.loaded` of
    them; ``decode`` is as :attr:`MediaInput.decode`, given the numbers first.
    """

    grids: Tensor
    numbers: range
    load: Callable[[range], Tensor]
    decode: Callable[[range, Tensor], Tensor] = lambda numbers, loaded: loaded

    def part(self, numbers: range) -> MediaToCome:
        """These of the media alone, which are neighbours."""
        grids = self.grids[numbers.start : numbers.stop]
        return replace(self, grids=grids, numbers=self.numbers[numbers.start : numbers.stop])

    def taken(self) -> MediaInput:
        """On the encoder's device. Collective: the ranks that encode them together."""
        return MediaInput(
            loaded=self.load(self.numbers),
            grids=self.grids,
            decode=partial(self.decode, self.numbers),
        )


Media = MediaInput | MediaToCome


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one of the encoder's replicas encodes of a unit: all, or the media of these numbers.

    ``rows`` are those of the unit's features that they have.
    """

    encoder_replica: int
    media: tuple[int, ...] | None = None
    rows: tuple[slice, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What a microbatch has for one encoder; all but ``media`` is the same on a replica's ranks.

    ``places`` has, of each row, where the media's tokens lie, ascending. ``shares`` say which of
    the encoder's replicas encodes what of it: together all, each replica at most one. ``media`` are
    of the share that this rank encodes, None on ranks that encode none, and in later chunks.
    """

    places: tuple[NDArray[np.int64], ...] = ()
    grids: tuple[Grid, ...] = ()
    shares: tuple[Share, ...] = (Share(encoder_replica=0),)
    media: Media | None = None

    @property
    def rows(self) -> int:
        """Of the encoder's input, known also where that is not loaded."""
        return sum(map(prod, self.grids))

    @property
    def tokens(self) -> int:
        """In the text, and so features."""
        return sum(map(len, self.places))

    @property
    def encoder_replicas(self) -> tuple[int, ...]:
        return tuple(share.encoder_replica for share in self.shares)


@dataclass(frozen=True, kw_only=True)
class TextNeeds:
    """Which tensors of a microbatch's text a chunk consumes; all take the positions."""

    input_ids: bool
    labels: bool
    loss_mask: bool

    @classmethod
    def of_stage(cls, *, first: bool, last: bool, balances: bool) -> TextNeeds:
        """By where text is embedded, where the loss is, and where routers ask what counts."""
        return cls(input_ids=first, labels=last, loss_mask=last or balances)


ALL_TEXT = TextNeeds(input_ids=True, labels=True, loss_mask=True)


@dataclass(frozen=True)
class Microbatch:
    """One microbatch in decoder layout: b samples padded on the right to s tokens, or one pack.

    What its chunk has no use for is None (:class:`TextNeeds`). Text is on the host; media come at
    the pass that encodes them. The labels are already shifted: ``labels[:, t]`` is the token that
    follows ``input_ids[:, t]``, and ``loss_mask[:, t]`` is 1 where that token counts.

    In a pack, b is 1 and the samples follow each other, each of their renderings attending to
    itself only; ``segments`` are the tokens of each. Padding stands behind the last. With context
    parallelism, the tensors have the columns of this rank's ``own`` part of the rows alone, s of
    them; segments, lengths and the units' places are the whole row's.
    """

    input_ids: Tensor | None  # [b, s] int64
    position_ids: Tensor  # [3, b, s] int64: time, height, width
    labels: Tensor | None  # [b, s] int64
    loss_mask: Tensor | None  # [b, s] float32
    tokens: int  # tokens before padding
    units: Mapping[str, Unit] = field(default_factory=dict)  # by the encoder's name
    segments: tuple[int, ...] | None = None  # None: not packed, each row is one sample
    number: int = 0  # in its step
    lengths: tuple[int, ...] = ()  # tokens of each sample, or of each of its renderings
    own: OwnPart | None = None  # None: the rank holds whole rows
    # The loss mask once it is known which samples have bad media, for which the call waits; None:
    # there are none.
    counts: Callable[[], Tensor | None] | None = None

    def __post_init__(self) -> None:
        if self.segments is not None:
            assert self.position_ids.shape[1] == 1, self.position_ids.shape
            assert sum(self.segments) == self.tokens, (self.segments, self.tokens)

    @property
    def split(self) -> TokenSplit:
        """Which tokens of a row its ranks hold."""
        if self.own is None:
            return TokenSplit.whole(self.position_ids.shape[2])
        return self.own.split

    @property
    def capacity(self) -> int:
        """Tokens with padding, of whole rows."""
        return int(self.position_ids.shape[1]) * self.split.length

    def heard(self) -> Microbatch:
        """The same, where no token counts in samples with bad media; waits for word of them."""
        if self.loss_mask is None or self.counts is None:
            return self
        mask = self.counts()
        return self if mask is self.loss_mask else replace(self, loss_mask=mask)
