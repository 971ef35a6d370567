"""How many samples training and evaluation steps take."""

from argparse import Namespace
from typing import Any

from loongplug.data.sample_order import StepSizes
from loongplug.training.rules.rule import data_parallel_size, rule
from loongplug.training.step_sizes import eval_sizes, step_sizes

_RAMP, _SCHEDULE = "--rampup-batch-size", "--step-batch-size-schedule"


@rule(
    refuses=f"`{_RAMP}` without `--global-batch-size` or with increments that do not lead "
    f"there, `{_SCHEDULE}` with `--global-batch-size` or with sizes that do not grow, either "
    "with the other or with `--decrease-batch-size-if-needed`",
    reason="each step's size follows from the samples before it, in every layout and after a "
    "resume",
    cure=f"give {_RAMP} START INCREMENT SAMPLES and the last size by --global-batch-size, or "
    f"all sizes by {_SCHEDULE} 'TOKENS:SIZE TOKENS:SIZE'",
)
def batch_ramp(args: Namespace, model: Any) -> str | None:
    flag = _SCHEDULE if args.rampup_batch_size is None else _RAMP
    given = args.step_batch_size_schedule if flag == _SCHEDULE else args.rampup_batch_size
    if given is None:
        return None
    if flag == _RAMP and args.step_batch_size_schedule is not None:
        return f"{_RAMP} with {_SCHEDULE}"
    if args.decrease_batch_size_if_needed:
        return f"{flag} with --decrease-batch-size-if-needed"
    if flag == _SCHEDULE and args.global_batch_size is not None:
        return f"{_SCHEDULE} with --global-batch-size"
    try:
        step_sizes(args)
    except ValueError as error:
        said = " ".join(map(str, given)) if flag == _RAMP else given
        return f"{flag} {said}: {error}"
    return None


def known_sizes(args: Namespace) -> StepSizes | None:
    """The sizes of training's steps; None without any, or where another rule refuses them."""
    try:
        return None if batch_ramp(args, None) else step_sizes(args)
    except ValueError:
        return None


@rule(
    reason="every data parallel rank runs the same number of microbatches", cure="give a multiple"
)
def global_batch(args: Namespace, model: Any) -> str | None:
    """`--global-batch-size`, or a size before it, is not a multiple of micro-batch size x dp"""
    sizes, each, dp = known_sizes(args), args.micro_batch_size, data_parallel_size(args)
    if args.decrease_batch_size_if_needed or sizes is None or not each or not dp:
        return None
    wrong = [size for _, size in sizes.sizes if size % (each * dp)]
    if not wrong:
        return None
    what = "steps of" if sizes.vary else "--global-batch-size"
    return f"{what} {wrong[0]} does not divide by --micro-batch-size {each} x dp {dp}"


@rule(
    reason="every data parallel rank evaluates the same number of microbatches",
    cure="give a multiple",
)
def eval_batch(args: Namespace, model: Any) -> str | None:
    """`--eval-global-batch-size` is not a multiple of `--eval-micro-batch-size` (default: those
    of training) x dp
    """
    if known_sizes(args) is None and args.eval_global_batch_size is None:
        return None
    own = (args.eval_global_batch_size, args.eval_micro_batch_size) != (None, None)
    if not own and not args.decrease_batch_size_if_needed:
        return None  # as training's
    batch, each = eval_sizes(args, dp=data_parallel_size(args))
    if not batch or not each:
        return None if batch is None or each is None else "no sample to an evaluation step"
    if batch % each == 0:
        return None
    return f"evaluation steps of {batch} samples do not divide by microbatches of {each}"
