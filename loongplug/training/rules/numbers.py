"""Numbers that Megatron accepts at the start, and that end or spoil a run later."""

import math
from argparse import Namespace
from typing import Any

from loongplug.training.rules.rule import evaluates, excludes, flag, flag_of, rule

_LAST_SEED = 2**31 - 1


@rule(reason="weights would be so after the first step", cure="give a finite number")
def finite_numbers(args: Namespace, model: Any) -> str | None:
    """a flag whose number is NaN or infinite"""
    wrong = [
        f"{flag_of(name)} is {value:g}"
        for name, value in sorted(vars(args).items())
        if isinstance(value, float) and not math.isfinite(value)
    ]
    return ", ".join(wrong) or None


@rule(reason="no optimizer takes them", cure="correct the numbers; betas are below 1")
def optimizer_numbers(args: Namespace, model: Any) -> str | None:
    """`--lr`, `--min-lr`, `--decoupled-lr`, `--decoupled-min-lr`, `--weight-decay`, `--adam-eps`,
    `--clip-grad` or a warm-up below 0, `--adam-beta1` or `--adam-beta2` outside of 0 to 1
    """
    least = (
        *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "adam_eps"),
        *("clip_grad", "lr_warmup_init", "lr_warmup_iters", "lr_warmup_fraction"),
    )
    given = {name: getattr(args, name) for name in (*least, "adam_beta1", "adam_beta2")}
    wrong = [
        f"{flag_of(name)} is {value:g}"
        for name, value in given.items()
        if value is not None and (value < 0 or (name not in least and value >= 1))
    ]
    return ", ".join(wrong) or None


@rule(
    refuses=f"a `--seed` outside of 1 to {_LAST_SEED}",
    reason="not all generators of random numbers take others",
    cure="give one of these",
)
def seed(args: Namespace, model: Any) -> str | None:
    return None if 1 <= args.seed <= _LAST_SEED else f"--seed {args.seed}"


@rule(
    reason="there would be nothing to evaluate on",
    cure="give --valid-data-path FILE or --valid-share, or drop --eval-iters",
    training_only=True,
)
def evaluation(args: Namespace, model: Any) -> str | None:
    """`--eval-iters` without `--valid-data-path` or `--valid-share`, or below 0"""
    if args.eval_iters is not None and args.eval_iters < 0:
        return f"--eval-iters {args.eval_iters}"
    if args.eval_iters and not evaluates(args):
        return f"--eval-iters {args.eval_iters} without validation data"
    return None


valid_share = excludes(
    flag("--valid-share"),
    flag("--valid-data-path"),
    reason="validation has rows of its own, or some of the training data's",
    cure="give one of the two",
)


@rule(
    reason="the rows are those of the validation data, and are answered when it is evaluated",
    cure="give 1 or more with validation data and without --eval-iters 0, or drop the flag",
    training_only=True,
)
def eval_generate(args: Namespace, model: Any) -> str | None:
    """`--eval-generate` below 1, without validation data, or with `--eval-iters 0`"""
    count = args.eval_generate
    if count is None or (count >= 1 and evaluates(args) and args.eval_iters != 0):
        return None
    lacks = "" if evaluates(args) else " without validation data"
    return f"--eval-generate {count}{lacks or ' with --eval-iters 0' * (args.eval_iters == 0)}"
