"""The one table of refusals at start-up, put together from a file for each subject.

A new rule goes into its subject's file, a new subject's tuple into ``RULES``. What belongs here are
rules and the table of modes that meet in the docs (``modes.py``); nothing that communicates, and
nothing that runs.
"""

from argparse import Namespace
from typing import Any

from loongplug.training.rules import (
    batch,
    data,
    decoder_memory,
    experts,
    freezing,
    hetero,
    layout,
    lora,
    machine,
    model,
    overlap,
    pipeline,
    start,
    unsupported,
)
from loongplug.training.rules.rule import Rule

SUBJECTS: dict[str, tuple[Rule, ...]] = {
    "Start of a run": start.RULES,
    "Data": data.RULES,
    "Layout": layout.RULES,
    "Batch sizes": batch.RULES,
    "Pipeline": pipeline.RULES,
    "The encoder's own layout": hetero.RULES,
    "Model": model.RULES,
    "Experts": experts.RULES,
    "Overlap of experts' exchange": overlap.RULES,
    "The decoder's activations": decoder_memory.RULES,
    "Freezing": freezing.RULES,
    "LoRA and learning rates": lora.RULES,
    "Machine": machine.RULES,
    "Flags of Megatron": unsupported.RULES,
}
RULES: tuple[Rule, ...] = tuple(rule for rules in SUBJECTS.values() for rule in rules)


def violations(
    args: Namespace, model: Any, *, training: bool = True, verified: bool = False
) -> list[tuple[Rule, str]]:
    """The rules that ``args`` and ``model`` violate, in the table's order, and what is wrong."""
    return [
        (rule, problem)
        for rule in RULES
        if (training or not rule.training_only)
        and (rule.verified or not verified)
        and (problem := rule.check(args, model)) is not None
    ]


def violated_rules(
    args: Namespace, model: Any, *, training: bool = True, verified: bool = False
) -> list[str]:
    """One line for each rule that ``args`` and ``model`` violate, in the table's order."""
    return [
        f"{problem}: {rule.reason}; {rule.cure} [{rule.name}]"
        for rule, problem in violations(args, model, training=training, verified=verified)
    ]
