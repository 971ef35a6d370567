"""The sizes of training and evaluation steps that the flags ask for, and the learning rate's course
over steps of different sizes.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from loongplug.data.sample_order import StepSizes
from loongplug.platform.replacements import as_wrapper


def parsed_schedule(schedule: str, *, seq_length: int) -> StepSizes:
    """Megatron's own reading of ``--step-batch-size-schedule``, in tokens; ValueError for none."""
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
    return StepSizes(sizes=tuple(sizes))


def step_sizes(args: Namespace) -> StepSizes | None:
    """The sizes of training steps that the flags ask for; None where they leave it to Megatron."""
    ramp: Sequence[int] | None = args.rampup_batch_size
    if ramp is not None:
        if args.global_batch_size is None:
            raise ValueError("it leads to --global-batch-size, which is not given")
        start, increment, samples = (int(value) for value in ramp)
        return StepSizes.ramp(
            start=start, increment=increment, samples=samples, end=args.global_batch_size
        )
    if args.step_batch_size_schedule is not None and args.seq_length:
        return parsed_schedule(args.step_batch_size_schedule, seq_length=args.seq_length)
    size: int | None = args.global_batch_size
    return None if size is None else StepSizes.constant(size)


def eval_sizes(args: Namespace, *, dp: int) -> tuple[int | None, int | None]:
    """Samples of an evaluation step, and of its microbatches over all ``dp`` replicas.

    None where training's are not given; ValueError as of :func:`step_sizes`.
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


def rates_of(sizes: StepSizes) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """A wrapper of Megatron's making of the scheduler, whose unit are samples.

    Warm-up, decay and weight decay then end with the iterations that their flags name.
    """

    @as_wrapper
    def get_optimizer_param_scheduler(original: Any, optimizer: Any) -> Any:
        from megatron.training.global_vars import get_args

        scheduler = original(optimizer)
        _count_samples(scheduler, get_args(), sizes)
        scheduler.step(0)
        return scheduler

    return get_optimizer_param_scheduler


def _count_samples(scheduler: Any, args: Namespace, sizes: StepSizes) -> None:
    decay = args.lr_decay_iters  # upstream has set it where it was not given
    scheduler.lr_decay_steps = end = sizes.samples(decay)
    scheduler.wd_incr_steps = sizes.samples(args.train_iters)
    if args.lr_warmup_fraction is None:
        scheduler.lr_warmup_steps = sizes.samples(args.lr_warmup_iters)
    else:
        scheduler.lr_warmup_steps = args.lr_warmup_fraction * end
    if args.lr_wsd_decay_iters is not None:
        scheduler.wsd_decay_steps = end - sizes.samples(max(0, decay - args.lr_wsd_decay_iters))
