"""What is frozen. That a pattern matches something is asked once the model is built."""

from argparse import Namespace
from typing import Any

from loongplug.training.freezing import MODULES, freezing_of
from loongplug.training.rules.rule import Rule


def something_trains(args: Namespace, model: Any) -> str | None:
    """Not every module is frozen, unless patterns name what trains."""
    freezing = freezing_of(args, model)
    if freezing.train or set(freezing.modules) != set(MODULES.values()):
        return None
    return " with ".join(f"model.{key}.freeze=true" for key in MODULES)


def exceptions(args: Namespace, model: Any) -> str | None:
    """Exceptions are made from something that is frozen."""
    freezing = freezing_of(args, model)
    if not freezing.train or freezing.modules or freezing.adapted or freezing.freeze:
        return None
    return "--train-parameters with nothing frozen"


RULES: tuple[Rule, ...] = (
    Rule(
        name="something-trains",
        refuses="`freeze` of encoder, projector and foundation without `--train-parameters`",
        check=something_trains,
        reason="there is nothing to train",
        cure="leave one of them to train, or name parameters with --train-parameters",
        training_only=True,
    ),
    Rule(
        name="exceptions",
        refuses="`--train-parameters` where no module is frozen and no `--freeze-parameters` given",
        check=exceptions,
        reason="it makes exceptions from what is frozen, and does not freeze the rest",
        cure="add --freeze-parameters '*' to train nothing else",
        training_only=True,
    ),
)
