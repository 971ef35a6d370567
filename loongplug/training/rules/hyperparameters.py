"""Lengths, rates and batch sizes of a run, and the numbers that no run can have."""

import math
from argparse import Namespace
from typing import Any

from loongplug.data.sample_order import StepSizes
from loongplug.training.rules.rule import (
    Problems,
    data_parallel_size,
    excludes,
    flag_of,
    number,
    rule,
    value_of,
)
from loongplug.training.step_sizes import step_sizes

# Numbers of 1 or more.
_COUNTS = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    *("--context-parallel-size", "--expert-model-parallel-size"),
    *("--expert-tensor-parallel-size", "--seq-length", "--packing-look-ahead"),
    *("--max-row-mib", "--micro-batch-size", "--global-batch-size"),
    *("--eval-micro-batch-size", "--eval-global-batch-size", "--train-iters", "--epochs"),
    *("--save-interval", "--log-interval", "--eval-interval", "--keep-checkpoints"),
    *("--ckpt-step", "--eval-generate"),
)
# Numbers of 0 or more.
_NOT_NEGATIVE = (
    *("--lr", "--min-lr", "--decoupled-lr", "--decoupled-min-lr", "--weight-decay", "--adam-eps"),
    *("--clip-grad", "--lr-warmup-init", "--lr-warmup-iters", "--lr-warmup-fraction"),
    *("--eval-iters", "--dp-balance-trigger-threshold-vit", "--full-hetero-dp-encoder-speed"),
)
# Numbers from the first bound on, and below the second.
_BOUNDS = {
    (1, math.inf): _COUNTS,
    (0, math.inf): _NOT_NEGATIVE,
    (0, 1): ("--adam-beta1", "--adam-beta2"),
    (1, 2**31): ("--seed",),  # not all generators of random numbers take others
}
_RAMP, _SCHEDULE = "--rampup-batch-size", "--step-batch-size-schedule"


@rule(reason="a run is not defined without them", cure="add them")
def required_flags(args: Namespace, model: Any) -> Problems:
    """`--training-phase`, `--seq-length`, `--micro-batch-size`, `--lr` or both of `--train-iters`
    and `--epochs` are missing
    """
    needed = ["--training-phase", "--seq-length", "--micro-batch-size", "--lr"]
    needed += [] if args.epochs is not None else ["--train-iters"]
    if missing := [flag for flag in needed if value_of(args, flag) is None]:
        yield f"{', '.join(missing)} not given"


run_length = excludes(
    number("--epochs", above=0),
    number("--train-iters", above=0),
    refuses="`--epochs` with `--train-iters`",
    reason="both say when the run ends",
    cure="give one of the two",
)


@rule(reason="no run has such numbers", cure="give a finite one within its bounds")
def numbers(args: Namespace, model: Any) -> Problems:
    """a parallel size, batch size, length or interval below 1; a rate, decay, warm-up or threshold
    below 0; a beta of Adam outside of 0 to 1, a `--seed` outside of 1 to 2147483647; a flag whose
    number is NaN or infinite
    """
    for name, value in sorted(vars(args).items()):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{flag_of(name)} is {value:g}"
    for (least, end), flags in _BOUNDS.items():
        for flag in flags:
            if (value := value_of(args, flag)) is not None and value < least:
                yield f"{flag} is {value:g}, below {least}"
            elif value is not None and end <= value < math.inf:
                yield f"{flag} is {value}, not below {end}"


@rule(
    reason="the learning rate would never decay",
    cure="shorten the warm-up or lengthen the run",
)
def warm_up(args: Namespace, model: Any) -> Problems:
    """`--lr-warmup-iters` not below `--lr-decay-iters` (or `--train-iters`)"""
    end = args.lr_decay_iters or args.train_iters
    if end is not None and 0 < end <= args.lr_warmup_iters:
        yield f"--lr-warmup-iters {args.lr_warmup_iters} does not end before iteration {end}"


@rule(
    refuses=f"`{_RAMP}` without `--global-batch-size` or with increments that do not lead "
    f"there, `{_SCHEDULE}` with `--global-batch-size` or with sizes that do not grow, either "
    "with the other or with `--decrease-batch-size-if-needed`",
    reason="each step's size follows from the samples before it, in every layout and after a "
    "resume",
    cure=f"give {_RAMP} START INCREMENT SAMPLES and the last size by --global-batch-size, or "
    f"all sizes by {_SCHEDULE} 'TOKENS:SIZE TOKENS:SIZE'",
)
def batch_ramp(args: Namespace, model: Any) -> Problems:
    ramp, schedule = args.rampup_batch_size, args.step_batch_size_schedule
    if ramp is None and schedule is None:
        return
    flag, given = (_SCHEDULE, schedule) if ramp is None else (_RAMP, " ".join(map(str, ramp)))
    if ramp is not None and schedule is not None:
        yield f"{_RAMP} with {_SCHEDULE}"
    elif args.decrease_batch_size_if_needed:
        yield f"{flag} with --decrease-batch-size-if-needed"
    elif ramp is None and args.global_batch_size is not None:
        yield f"{_SCHEDULE} with --global-batch-size"
    else:
        try:
            step_sizes(args)
        except ValueError as error:
            yield f"{flag} {given}: {error}"


def known_sizes(args: Namespace) -> StepSizes | None:
    """The sizes of training's steps; None without any, or where another rule refuses them."""
    try:
        return None if batch_ramp(args, None) else step_sizes(args)
    except ValueError:
        return None


@rule(
    reason="every data parallel rank runs the same number of microbatches", cure="give a multiple"
)
def global_batch(args: Namespace, model: Any) -> Problems:
    """`--global-batch-size`, or a size before it, is not a multiple of micro-batch size x dp, or is
    below it with `--decrease-batch-size-if-needed`
    """
    sizes, each, dp = known_sizes(args), args.micro_batch_size, data_parallel_size(args)
    if sizes is None or not each or not dp:
        return
    wrong = [size for _, size in sizes.sizes if size % (each * dp)]
    if args.decrease_batch_size_if_needed:
        if sizes.largest < each * dp:
            yield f"no sample to a step of --global-batch-size {sizes.largest} with dp {dp}"
    elif wrong:
        what = "steps of" if sizes.vary else "--global-batch-size"
        yield f"{what} {wrong[0]} does not divide by --micro-batch-size {each} x dp {dp}"
