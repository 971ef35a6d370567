"""The one table of refusals at start-up, put together from a file for each subject.

A new rule goes into its subject's file, a new subject into ``SUBJECTS``. Nothing here
communicates or runs.
"""

from argparse import Namespace
from typing import Any

from loongplug.training.rules import (
    experts,
    folders,
    hetero,
    hyperparameters,
    layout,
    megatron,
    model,
    streaming,
)
from loongplug.training.rules.rule import Rule, rules_of

# By the first line of their file, the rules of a subject.
SUBJECTS: dict[str, tuple[Rule, ...]] = {
    (each.__doc__ or "").partition(".\n")[0].rstrip("."): rules_of(each)
    for each in (
        *(hyperparameters, folders, layout, hetero, streaming),
        *(model, experts, megatron),
    )
}
RULES: tuple[Rule, ...] = tuple(rule for rules in SUBJECTS.values() for rule in rules)


def violations(
    args: Namespace, model: Any, *, training: bool = True, verified: bool = False
) -> list[tuple[Rule, str]]:
    """The rules that ``args`` and ``model`` violate, in the table's order, and what is wrong.

    Of numbers that are none, nothing else is said: others divide by them.
    """
    (numbers,) = (each for each in RULES if each.name == "numbers")
    return [
        (rule, problem)
        for rule in ([numbers] if numbers(args, model) else RULES)
        if (training or not rule.training_only)
        and (rule.verified or not verified)
        and (problem := rule(args, model)) is not None
    ]


def violated_rules(
    args: Namespace, model: Any, *, training: bool = True, verified: bool = False
) -> list[str]:
    """One line for each rule that ``args`` and ``model`` violate, in the table's order."""
    return [
        f"{problem}: {rule.reason}; {rule.cure} [{rule.name}]"
        for rule, problem in violations(args, model, training=training, verified=verified)
    ]
