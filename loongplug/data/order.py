"""Which samples a rank sees when: pure functions of the number of samples consumed so far.

All data-parallel ranks together walk one endless stream of positions. A global batch is the
next piece of that stream, whatever the number of ranks and the microbatch size, so a run goes
on with the same batches after either has changed.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def microbatch_positions(
    consumed_samples: int, *, micro_batch_size: int, dp_rank: int, dp_size: int
) -> range:
    """Stream positions of the microbatch a rank makes when this many samples are consumed.

    The microbatches that all ranks make at one time are neighbours; together they consume
    ``micro_batch_size * dp_size`` samples.
    """
    start = consumed_samples + dp_rank * micro_batch_size
    return range(start, start + micro_batch_size)


class SampleOrder:
    """The endless stream: position to sample index.

    Each epoch goes once through all samples, in an order of its own that follows from the seed
    and the epoch's number; without a seed every epoch goes through them as they are.
    """

    def __init__(self, num_samples: int, *, seed: int | None) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}: expected at least 1.")
        self._num_samples = num_samples
        self._seed = seed
        self._epoch: tuple[int, NDArray[np.int64]] | None = None  # the latest, kept for speed

    def indices(self, positions: Iterable[int]) -> list[int]:
        """Sample indices at these stream positions."""
        return [self.index(position) for position in positions]

    def index(self, position: int) -> int:
        """The sample index at a stream position."""
        epoch, offset = divmod(position, self._num_samples)
        if self._seed is None:
            return offset
        if self._epoch is None or self._epoch[0] != epoch:
            permutation = epoch_permutation(self._num_samples, seed=self._seed, epoch=epoch)
            self._epoch = epoch, permutation
        return int(self._epoch[1][offset])


def epoch_permutation(num_samples: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of one epoch, [num_samples]."""
    # RandomState is the one generator of numpy whose numbers are promised never to change:
    # a run must be able to resume after an upgrade.
    return np.random.RandomState([seed, epoch]).permutation(num_samples)
