"""What a run freezes, and the one place that does it: by the model's YAML and by patterns."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from torch import nn

from loongplug.checkpoint.common_errors import of_all_ranks, raise_together
from loongplug.checkpoint.parameter_holders import parameter_names
from loongplug.models.freezing import FREEZE_FLAG, TRAIN_FLAG, Freezing, idle_pattern
from loongplug.models.hf_mapping import Mapping, is_carried


def freezing_of(args: Namespace, model: Any) -> Freezing:
    """What the YAML's ``freeze`` and ``lora`` and the patterns of the command line ask for.

    A module with adapters is frozen but for them, with ``freeze`` or without.
    """
    modules = model.modules().items()
    frozen, adapted = (
        tuple(name for name, each in modules if getattr(each, setting))
        for setting in ("freeze", "lora")
    )
    return Freezing(
        modules=tuple(name for name in frozen if name not in adapted),
        adapted=adapted,
        freeze=tuple(args.freeze_parameters),
        train=tuple(args.train_parameters),
    )


def trained_modules(freezing: Freezing, *, mapping: Mapping) -> list[str]:
    """The modules, by their names in the built model, in which a parameter there trains."""
    names = (each.name for each in mapping.entries() if freezing.trains(each.name))
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def apply_freezing(chunks: Sequence[nn.Module], freezing: Freezing, *, mapping: Mapping) -> None:
    """Say of each of this rank's parameters whether it trains.

    Has to happen before gradient buffers and optimizers are made. Collective: the default group.
    ValueError on every rank for a pattern without effect on any, and where nothing trains.
    """
    names = []
    trains = False
    for name, parameter in parameter_names(chunks, mapping):
        names.append(name)
        parameter.requires_grad_(freezing.trains(name))
        trains = trains or parameter.requires_grad
    patterns_only = Freezing(freeze=freezing.patterns)
    mine = trains, freezing.without_effect(names), patterns_only.without_effect(names)
    trained, idle_there, unmatched_there = zip(*of_all_ranks(mine), strict=True)
    idle = frozenset[str].intersection(*idle_there)
    unmatched = frozenset[str].intersection(*unmatched_there)
    problems = []
    if idle:
        known = [each.name for each in mapping.entries() if not is_carried(each.name)]
        problems += [
            idle_pattern(pattern, flag=flag, names=known, matches=pattern not in unmatched)
            for flag, patterns in ((FREEZE_FLAG, freezing.freeze), (TRAIN_FLAG, freezing.train))
            for pattern in dict.fromkeys(patterns)
            if pattern in idle
        ]
    elif not any(trained):
        problems.append(
            "Every parameter of the model is frozen: there is nothing to train. Drop a freeze, or "
            f"name what is to train with {TRAIN_FLAG}."
        )
    raise_together(ValueError("\n".join(problems)) if problems else None)
