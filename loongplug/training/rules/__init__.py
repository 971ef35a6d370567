"""The one table of refusals at start-up, put together from a file for each subject.

A new rule goes into its subject's file, a new subject into ``SUBJECTS``. Nothing here
communicates or runs.
"""

from argparse import Namespace
from typing import Any

from loongplug.training.rules import (
    communicators,
    context,
    data,
    decoder_memory,
    experts,
    folders,
    hetero,
    hyperparameters,
    layout,
    lora,
    megatron,
    model,
    own_ranks,
    streaming,
)
from loongplug.training.rules.rule import Rule, rules_of

SUBJECTS: dict[str, tuple[Rule, ...]] = {
    "Lengths, rates and batch sizes": rules_of(hyperparameters),
    "Weights, tokenizer and folders": rules_of(folders),
    "Data": rules_of(data),
    "Layout": rules_of(layout),
    "Context parallelism": rules_of(context),
    "The encoder's own layout": rules_of(hetero),
    "Encoders in the pipeline's bubbles": rules_of(streaming),
    "Encoders on ranks of their own": rules_of(own_ranks),
    "Communicators": rules_of(communicators),
    "Model": rules_of(model),
    "Experts": rules_of(experts),
    "The decoder's activations": rules_of(decoder_memory),
    "LoRA and learning rates": rules_of(lora),
    "Parts of Megatron": rules_of(megatron),
}
RULES: tuple[Rule, ...] = tuple(rule for rules in SUBJECTS.values() for rule in rules)


def violations(
    args: Namespace, model: Any, *, training: bool = True, verified: bool = False
) -> list[tuple[Rule, str]]:
    """The rules that ``args`` and ``model`` violate, in the table's order, and what is wrong.

    Of numbers that are none, nothing else is said: others divide by them.
    """
    numbers = next(each for each in RULES if each.name == "least-numbers")
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
