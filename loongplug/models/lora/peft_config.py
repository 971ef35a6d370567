"""``adapter_config.json``: what ``peft`` is told, and what it says of adapters from elsewhere."""

import re
from collections.abc import Mapping as Dictionary
from typing import Any

from loongplug.models.lora.mapping import AdapterTable

# What else peft can do to an adapter, with the value that leaves it plain.
_PLAIN: dict[str, tuple[object, ...]] = {
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
}


def peft_config(table: AdapterTable, *, base: str | None) -> dict[str, Any]:
    """The config of all adapters; ``base`` names the folder of the model that they are for.

    Modules are named by regular expressions over whole names. ``peft`` has one dropout for all,
    and none for parameters (experts); it only matters where it goes on training.
    """
    first = table.linears[0].settings
    modules = {_pattern(name): each for each in table.linears for name in each.modules}
    linears = [name for name, each in modules.items() if each.experts is None]
    parameters = [
        name.partition("{}.")[2]
        for each in table.linears
        if each.experts is not None
        for name in each.modules
    ]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": _number(first.scale * first.rank),
        "lora_dropout": 0.0 if parameters else first.dropout,
        "target_modules": "|".join(f"({name})" for name in linears) if linears else [],
        "target_parameters": parameters or None,
        "rank_pattern": {
            name: each.settings.rank
            for name, each in modules.items()
            if each.settings.rank != first.rank
        },
        "alpha_pattern": {
            name: _number(each.settings.scale * each.settings.rank)
            for name, each in modules.items()
            if each.settings.scale * each.settings.rank != first.scale * first.rank
        },
    }


def config_problems(config: Dictionary[str, Any], table: AdapterTable) -> list[str]:
    """What ``config`` says otherwise than the adapters in ``table``, one line each."""
    problems = [
        f"{key} is {config[key]!r}, which has no counterpart here"
        for key, plain in _PLAIN.items()
        if key in config and config[key] not in plain
    ]
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type is {config.get('peft_type')!r}, expected 'LORA'")
    for linear in table.linears:
        for name in linear.modules:
            module = name.replace("{}", "0")
            rank = _of(config, "rank_pattern", module, config.get("r"))
            alpha = _of(config, "alpha_pattern", module, config.get("lora_alpha"))
            if rank != linear.settings.rank:
                problems.append(f"{module} has rank {rank}, expected {linear.settings.rank}")
            elif alpha != linear.settings.scale * linear.settings.rank:
                expected = _number(linear.settings.scale * linear.settings.rank)
                problems.append(f"{module} has lora_alpha {alpha}, expected {expected}")
    return problems


def _pattern(name: str) -> str:
    return re.escape(name).replace(re.escape("{}"), r"\d+")


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _of(config: Dictionary[str, Any], patterns: str, module: str, default: Any) -> Any:
    """A module's own value, as ``peft`` finds it."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
