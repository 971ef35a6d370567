"""A row as context parallel attention sees it, made once per microbatch on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loongplug.context.segments import Segments
from loongplug.context.tiles import TileGroups, grouped, tiles
from loongplug.context.token_split import ContextShard, TokenSplit
from loongplug.platform.devices import to_device


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextRow:
    """A row, or a pack, of which this rank holds a part; all layers of a microbatch share it.

    What only some ways of communication need is made when it is first asked for.
    """

    split: TokenSplit
    segments: Segments  # of the padded row
    rank: int  # in the context parallel group
    device: torch.device

    @property
    def tokens(self) -> int:
        """How many tokens this rank holds."""
        return self.split.parts[self.rank].tokens

    @property
    def ranks(self) -> int:
        """How many ranks hold a part."""
        return len(self.split.parts)

    @cached_property
    def engine_order(self) -> bool:
        """Whether it is one segment, and split as TransformerEngine's attention expects it."""
        return len(self.segments.lengths) == 1 and self.split.in_equal_chunks

    @cached_property
    def order(self) -> Tensor:
        """The places of the row's tokens, part after part; int64 [length]."""
        return self._index(self.split.order)

    @cached_property
    def back(self) -> Tensor:
        """The index in :attr:`order` of each place of the row; int64 [length]."""
        return self._index(np.argsort(self.split.order))

    @cached_property
    def tiles(self) -> TileGroups:
        """This rank's queries against the keys of the whole row."""
        return self._tiles(ContextShard.whole(self.split.length))

    @cached_property
    def tiles_by_rank(self) -> Sequence[TileGroups]:
        """This rank's queries against the keys of each rank."""
        return [self._tiles(part) for part in self.split.parts]

    def _tiles(self, keys: ContextShard) -> TileGroups:
        return grouped(tiles(self.split.parts[self.rank], keys, self.segments))

    def _index(self, places: NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(places), self.device)


def context_row(
    split: TokenSplit, lengths: Sequence[int], *, rank: int, device: torch.device | str
) -> ContextRow:
    """The row with segments of these ``lengths``, as ``rank`` sees it.

    Tokens of the row that are in no segment are padding, a segment of its own. Raises ValueError
    for lengths that the row cannot have.
    """
    return ContextRow(
        split=split,
        segments=Segments.of(lengths, padded_to=split.length),
        rank=rank,
        device=torch.device(device),
    )
