"""What is frozen. Whether a pattern matches anything is checked when the model is built."""

from argparse import Namespace
from typing import Any

from loongplug.training.freezing import freezing_of
from loongplug.training.rules.rule import rule


@rule(
    reason="there is nothing to train",
    cure="leave one of them to train, or name parameters with --train-parameters",
    training_only=True,
)
def something_trains(args: Namespace, model: Any) -> str | None:
    """`freeze` of encoder, projector and foundation without `--train-parameters`"""
    freezing = freezing_of(args, model)
    if freezing.train or set(freezing.modules) != set(model.modules()):
        return None
    return " with ".join(f"model.{model.keys[name]}.freeze=true" for name in model.modules())


@rule(
    reason="it makes exceptions from what is frozen, and does not freeze the rest",
    cure="add --freeze-parameters '*' to train nothing else",
    training_only=True,
)
def exceptions(args: Namespace, model: Any) -> str | None:
    """`--train-parameters` where no module is frozen and no `--freeze-parameters` given"""
    freezing = freezing_of(args, model)
    if not freezing.train or freezing.modules or freezing.adapted or freezing.freeze:
        return None
    return "--train-parameters with nothing frozen"
