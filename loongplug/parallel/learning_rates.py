"""Each module's groups of parameters and learning rate, in the words of Megatron's optimizers."""

from collections.abc import Mapping
from typing import Any, cast

from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from torch import nn

from loongplug.parallel.parameter_groups import MODULE


def rate_overrides(
    config: Any, lr_mults: Mapping[str, float]
) -> dict[ParamKey, ParamGroupOverride]:
    """What Megatron has to be told to give each module groups with its name and its rates.

    ``config`` is the optimizer's, ``lr_mults`` has the multiples of the learning rate by the
    modules' names.
    """
    overrides: dict[ParamKey, ParamGroupOverride] = {}
    for name, mult in lr_mults.items():
        prefix = f"module.{name}."  # as a part's wrapper calls it

        def within(_: nn.Parameter, parameter: str, prefix: str = prefix) -> bool:
            return parameter.startswith(prefix)

        settings: dict[str, Any] = {MODULE: name}
        if mult != 1.0:
            settings |= {
                "max_lr": config.lr * mult,
                "min_lr": (config.min_lr or 0.0) * mult,
            }
        predicate = ParamWithNamePredicate(name=f"parameters of {name}", fn=within)
        overrides[ParamKey(with_name_predicate=predicate)] = cast("ParamGroupOverride", settings)
    return overrides
