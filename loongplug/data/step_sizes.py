"""How many samples each step takes: a function of the samples that were consumed before it.

Megatron asks its calculator before every step. Data are read ahead of it, and so need the sizes
of steps to come; both get them from the same list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The global batch of a run. Nothing else says where its steps begin.

    ``sizes`` are pairs: how many samples have to be consumed before a step for it to take so many.
    The first is for 0 samples; both numbers ascend.
    """

    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, size: int) -> Self:
        """Every step takes ``size`` samples."""
        return cls(sizes=((0, size),))

    @classmethod
    def ramp(cls, *, start: int, increment: int, samples: int, end: int) -> Self:
        """From ``start`` to ``end`` in equal parts of ``samples``, ``increment`` more in each."""
        if start < 1 or increment < 1 or samples < 0:
            raise ValueError("expected a start and an increment of 1 or more and 0 samples or more")
        if end < start or (end - start) % increment:
            raise ValueError(f"steps of {increment} do not lead from {start} to {end}")
        parts = (end - start) // increment or 1
        # Of sizes that begin at one sample, the largest stays.
        begins = {
            -(-samples * part // parts): start + part * increment
            for part in range((end - start) // increment + 1)
        }
        return cls(sizes=tuple(begins.items()))

    @property
    def largest(self) -> int:
        """The last size."""
        return self.sizes[-1][1]

    @property
    def vary(self) -> bool:
        """Whether there is more than one."""
        return len(self.sizes) > 1

    def schedule(self, *, seq_length: int) -> str:
        """As Megatron's ``--step-batch-size-schedule``, which counts tokens."""
        return " ".join(f"{begin * seq_length}:{size}" for begin, size in self.sizes)

    def at(self, consumed: int) -> int:
        """The size of a step that begins when so many samples are consumed."""
        return next(size for begin, size in reversed(self.sizes) if begin <= consumed)

    def microbatches(self, *, each: int, consumed: int = 0) -> Iterator[int]:
        """How many microbatches each step has, of those from ``consumed`` samples on. Endless.

        ``each``: samples of a microbatch of all data parallel ranks together. What of a size is
        no whole microbatch is left out, as Megatron does where it may decrease a batch.
        """
        while True:
            count = self.at(consumed) // each
            assert count, (self.sizes, each)
            yield count
            consumed += count * each

    def steps(self, samples: int, *, each: int) -> int:
        """The fewest steps that take so many samples; ``each`` as of :meth:`microbatches`."""
        consumed = steps = 0
        for (_, size), (end, _) in pairwise((*self.sizes, (samples, 0))):
            taken = size - size % each
            count = max(0, -(-(min(end, samples) - consumed) // taken))
            consumed += count * taken
            steps += count
        return steps

    def samples(self, steps: int) -> int:
        """How many the first ``steps`` steps of a run take.

        A step that has begun is finished: a size lasts until at or after the next one's begin.
        """
        consumed = 0
        for (_, size), (end, _) in pairwise(self.sizes):
            taken = min(steps, max(0, -(-(end - consumed) // size)))
            consumed += taken * size
            steps -= taken
        return consumed + steps * self.largest
