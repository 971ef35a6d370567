"""Which part of each row a context parallel rank holds, by the row's segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from loongplug.context.balance import BLOCK, balanced
from loongplug.context.segments import Segments
from loongplug.context.token_split import OwnPart, tokens_of_each, zigzag

Balance = Literal["zigzag", "lpt"]
BALANCES: tuple[Balance, ...] = get_args(Balance)

# Blocks of a rank where its tokens are few: of one block each, ranks could not get equal work.
_LEAST_BLOCKS = 8


@dataclass(frozen=True, kw_only=True)
class RowParts:
    """How rows are split over ``cp`` ranks, of which this is number ``rank``.

    With ``balance`` "lpt", each pack is split by its own segments, so that ranks have equally many
    pairs of query and key. All else is split by :func:`zigzag`.
    """

    cp: int
    rank: int
    balance: Balance = "zigzag"

    def of(self, length: int, *, segments: Sequence[int] | None = None) -> OwnPart:
        """This rank's part of a row of ``length`` tokens, padding included.

        ``segments`` are the tokens of a pack's samples, None where the row is no pack. A pure
        function of the arguments: all ranks that share a row come to one split of it.
        """
        if segments is None or self.balance == "zigzag":
            return OwnPart(zigzag(length, cp=self.cp), self.rank)
        each = tokens_of_each(length, cp=self.cp)
        block = min(BLOCK, -(-each // _LEAST_BLOCKS))
        split = balanced(Segments.of(segments, padded_to=length), cp=self.cp, block=block)
        return OwnPart(split, self.rank)
