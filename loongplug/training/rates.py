"""The learning rate's course over steps of different sizes."""

from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from typing import Any

from loongplug.data.step_sizes import StepSizes


def rates_of(sizes: StepSizes) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """A wrapper of Megatron's making of the scheduler, whose unit are samples.

    Warm-up, decay and weight decay then end with the iterations that their flags name.
    """

    def wrapper(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(original)
        def get_optimizer_param_scheduler(optimizer: Any) -> Any:
            from megatron.training.global_vars import get_args

            scheduler = original(optimizer)
            _count_samples(scheduler, get_args(), sizes)
            scheduler.step(0)
            return scheduler

        return get_optimizer_param_scheduler

    return wrapper


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
