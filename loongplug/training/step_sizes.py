"""How many samples each step takes: a function of the samples that were consumed before it.

Megatron asks its calculator before every step. Background processes load ahead of it, and so need
the sizes of steps to come; both get them from the same list.
"""

from argparse import Namespace
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The global batch of a run.

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
        """From ``start`` to ``end`` in equal parts of ``samples``, ``increment`` more in each.

        Raises:
            ValueError: the increments do not lead from the one to the other.
        """
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

    @classmethod
    def parsed(cls, schedule: str, *, seq_length: int) -> Self:
        """Megatron's own reading of ``--step-batch-size-schedule``, in tokens.

        Raises:
            ValueError: it is none.
        """
        # Not before the platform is active.
        from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

        try:
            sizes = StepBatchsizeNumMicroBatchesCalculator(
                micro_batch_size=1,
                data_parallel_size=1,
                decrease_batch_size_if_needed=False,
                rank=-1,  # which says nothing
                schedule=schedule,
                seq_length=seq_length,
            ).schedule
        except (AssertionError, OverflowError) as error:
            raise ValueError(str(error)) from error
        if any(before >= after for (_, before), (_, after) in pairwise(sizes)):
            raise ValueError("batch sizes must grow")
        return cls(sizes=tuple(sizes))

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

    def stretches(self, consumed: int = 0) -> list[tuple[int, int]]:
        """Runs of steps of one size, as (samples before them, size), from ``consumed`` on.

        A step that has begun is finished: a stretch ends at or after the next size's begin.
        """
        found = []
        for (_, size), (end, _) in pairwise(self.sizes):
            if end > consumed:
                found.append((consumed, size))
                consumed += -(-(end - consumed) // size) * size
        return [*found, (consumed, self.largest)]

    def samples(self, steps: int) -> int:
        """How many the first ``steps`` steps of a run take."""
        stretches = self.stretches()
        for (begin, size), (end, _) in pairwise(stretches):
            count = (end - begin) // size
            if steps <= count:
                return begin + steps * size
            steps -= count
        begin, size = stretches[-1]
        return begin + steps * size


@dataclass(frozen=True, kw_only=True)
class UnitSteps:
    """Where the steps begin among the microbatches that one replica's loader makes, from 0 on.

    ``begins`` and ``sizes`` are the stretches of steps of one size, both in microbatches.
    """

    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: StepSizes, *, consumed: int, each: int) -> Self:
        """Those of a loader that starts after ``consumed`` samples, which ends a step.

        ``each``: samples of a microbatch of all replicas together.
        """
        stretches = sizes.stretches(consumed)
        return cls(
            begins=tuple((begin - consumed) // each for begin, _ in stretches),
            sizes=tuple(size // each for _, size in stretches),
        )

    def place(self, index: int) -> tuple[int, int]:
        """A microbatch's number in its step, and how many the step has."""
        stretch = bisect_right(self.begins, index) - 1
        size = self.sizes[stretch]
        return (index - self.begins[stretch]) % size, size


def step_sizes(args: Namespace) -> StepSizes | None:
    """What the flags ask for; None where they leave it to Megatron.

    Raises:
        ValueError: with what is wrong about them.
    """
    ramp: Sequence[int] | None = args.rampup_batch_size
    if ramp is not None:
        if args.global_batch_size is None:
            raise ValueError("it leads to --global-batch-size, which is not given")
        start, increment, samples = (int(value) for value in ramp)
        return StepSizes.ramp(
            start=start, increment=increment, samples=samples, end=args.global_batch_size
        )
    if args.step_batch_size_schedule is not None and args.seq_length:
        return StepSizes.parsed(args.step_batch_size_schedule, seq_length=args.seq_length)
    size: int | None = args.global_batch_size
    return None if size is None else StepSizes.constant(size)


def eval_sizes(args: Namespace, *, dp: int) -> tuple[int | None, int | None]:
    """Samples of an evaluation step, and of its microbatches over all ``dp`` replicas.

    None where training's are not given.

    Raises:
        ValueError: as :func:`step_sizes`.
    """
    micro: int = args.eval_micro_batch_size or args.micro_batch_size or 0
    each = micro * dp or None
    if args.eval_global_batch_size is not None:
        return args.eval_global_batch_size, each
    sizes = step_sizes(args)
    if sizes is None or each is None:
        return None, each
    left = sizes.largest % each if args.decrease_batch_size_if_needed else 0
    return sizes.largest - left, each


def settle_step_sizes(args: Namespace, *, dp: int) -> None:
    """Say the sizes of training and evaluation steps in what Megatron's own loop goes by.

    It passes ``--rampup-batch-size`` over. With a schedule, it would count the learning rate's
    samples and those of an evaluation by steps of one microbatch.
    """
    sizes = step_sizes(args)
    if sizes is None:
        return
    args.eval_global_batch_size, _ = eval_sizes(args, dp=dp)
    args.rampup_batch_size, args.global_batch_size = None, sizes.largest
    args.step_batch_size_schedule = None
    if sizes.vary:
        args.step_batch_size_schedule = sizes.schedule(seq_length=args.seq_length)
        args._is_global_batch_size_explicitly_specified = False  # it refuses both from a user
