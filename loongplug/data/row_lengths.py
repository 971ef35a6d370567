"""How long padded rows are: no longer than the longest sample among them needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loongplug.data.extents import RowExtent

_ALIGNED = 8  # each rank's tokens are a multiple of it: kernels read operands by 16 bytes


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """As long as the longest sample, rounded up so that ``parts`` ranks get equally much of a row.

    Of the samples of one microbatch, or, with ``by_step``, of all that a replica has in the step:
    then its microbatches have one length, which pipeline stages need not tell each other.

    A pure function of lengths that every rank of the replica knows on the host.
    """

    parts: int = 1
    by_step: bool = False

    def of(self, microbatches: Iterable[Sequence[RowExtent]], *, longest: int) -> int:
        """Tokens of a row of any of these microbatches; at most ``longest``, which fits a rank."""
        needed = max((each.tokens for extents in microbatches for each in extents), default=0)
        multiple = self.parts * _ALIGNED
        return min(max(1, -(-needed // multiple)) * multiple, longest)
