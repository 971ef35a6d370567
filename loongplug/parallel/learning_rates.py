"""Learning rates of single modules, in the words of Megatron's optimizers."""

from collections.abc import Mapping
from typing import Any

from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from torch import nn


def rate_overrides(
    config: Any, lr_mults: Mapping[str, float]
) -> dict[ParamKey, ParamGroupOverride]:
    """What Megatron has to be told of modules whose learning rate is a multiple of the run's.

    ``config`` is the optimizer's, ``lr_mults`` has the multiples by the modules' names.
    """
    overrides: dict[ParamKey, ParamGroupOverride] = {}
    for name, mult in lr_mults.items():
        if mult == 1.0:
            continue
        prefix = f"module.{name}."  # as a part's wrapper calls it

        def within(_: nn.Parameter, parameter: str, prefix: str = prefix) -> bool:
            return parameter.startswith(prefix)

        predicate = ParamWithNamePredicate(name=f"parameters of {name}", fn=within)
        overrides[ParamKey(with_name_predicate=predicate)] = {
            "max_lr": config.lr * mult,
            "min_lr": (config.min_lr or 0.0) * mult,
        }
    return overrides
