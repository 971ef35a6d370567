"""An optimizer's groups of parameters: made by module, found again among those of a checkpoint.

A group is the parameters of one module that share settings. Rates may change between two runs, and
groups may come and go as modules are frozen; what says which group is which stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from torch import nn

from loongplug.platform.upstream_seams import PARAMETER_GROUP as MODULE

_RATES = ("max_lr", "min_lr")
# Of what Megatron knows groups by: not the rates, nor what follows from them.
_CHANGING = (*_RATES, "lr_mult")

Group = Mapping[str, Any]


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


@dataclass(frozen=True, kw_only=True)
class SavedRates:
    """The highest and least learning rate of a group here (``own``) and in the checkpoint.

    ``saved`` is None where the checkpoint does not tell.
    """

    module: str
    own: tuple[float, float]
    saved: tuple[float, float] | None


def groups_to_load(
    own: Sequence[Group], saved: Sequence[Group]
) -> tuple[list[dict[str, Any]], list[SavedRates]]:
    """For each of a run's groups, its settings with all else as saved; and its rates in both.

    ``params`` are left out. The rates in the groups are the run's.
    """
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    same = [key for key in param_group_identifier_keys if key not in (MODULE, *_CHANGING)]
    keys = {*param_group_identifier_keys, MODULE, "default_config"}
    groups, rates = [], []
    for group in own:
        alike = [each for each in saved if all(each.get(key) == group.get(key) for key in same)]
        named = [each for each in alike if each.get(MODULE) == group.get(MODULE)]
        # Where there is none: settings that all groups share.
        start = next(iter(named or alike or saved), {})
        settings = {key: group[key] for key in keys if key in group}
        groups.append({**start, **settings})
        rates.append(_rates(group, named))
    return groups, rates


def _rates(group: Group, named: Sequence[Group]) -> SavedRates:
    def of(each: Group) -> tuple[float, float]:
        return each["max_lr"], each["min_lr"]

    found = list(dict.fromkeys(map(of, named)))
    own = of(group)
    saved = found[0] if len(found) == 1 else own if own in found else None
    return SavedRates(module=str(group.get(MODULE, "a module")), own=own, saved=saved)
