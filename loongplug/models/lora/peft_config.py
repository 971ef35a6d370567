"""``adapter_config.json``: what ``peft`` is told, and what it says of adapters from elsewhere."""

import json
import re
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from loongplug.models.family import HuggingFaceModel
from loongplug.models.lora import LoraSettings
from loongplug.models.lora.mapping import AdaptedLinear, AdapterTable

ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# What says nothing of an adapter's values: names, training, and what is checked by itself.
_NEUTRAL = """
task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode
r lora_alpha lora_dropout rank_pattern alpha_pattern target_modules target_parameters
exclude_modules layers_to_transform layers_pattern megatron_core ensure_weight_tying
eva_config qalora_group_size
"""
# Of all other keys, also those that are not known, no value leaves adapters plain but these. First
# values of other kinds come with other weights in the model.
_PLAIN: dict[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
# A name, with numbers left open: no repetition within another, so that matching takes no time.
_SIMPLE = re.compile(r"(?:[\w.^$-]|\\[.-]|\\d\+)*")


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


def read_peft_config(folder: Path) -> dict[str, Any]:
    """The config in a folder of adapters; ValueError for none or a damaged one."""
    path = folder / ADAPTER_CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): give the folder of adapters that --save-lora or "
            "peft wrote."
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object: copy the file again.")
    return config


def open_adapters(folder: Path) -> Any:
    """The file of tensors in a folder of adapters; ValueError where there is none to read."""
    try:
        return safe_open(folder / ADAPTER_WEIGHTS_FILE, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{folder / ADAPTER_WEIGHTS_FILE} cannot be read as safetensors ({error}): give "
            "the folder of adapters that --save-lora or peft wrote."
        ) from error


def folder_linears(
    folder: Path, model: HuggingFaceModel, *, modules: Iterable[str]
) -> dict[str, LoraSettings | None]:
    """What a folder says of each linear of these modules that can have adapters, by its name.

    The names of the folder's tensors say which have some (of experts, its config); rank and alpha,
    its config.
    """
    config = read_peft_config(folder)
    if problems := _unlike_lora(config):
        raise ValueError(f"The adapters in {folder} are not plain: {'; '.join(problems)}")
    tensors = open_adapters(folder).keys()
    linears = {
        linear.name: _settings_of(adapted, config, folder=folder)
        if (adapted := _adapted(linear, config, tensors=tensors))
        else None
        for linear in AdapterTable(dict.fromkeys(modules, LoraSettings(rank=1)), model).linears
    }
    if not any(linears.values()):
        raise ValueError(
            f"The adapters in {folder} are beside no linear of this model: give those of the model"
        )
    return linears


def _adapted(
    linear: AdaptedLinear, config: Dictionary[str, Any], *, tensors: Iterable[str]
) -> list[str]:
    """The modules of a linear that have adapters, in all layers."""
    if linear.experts is not None:
        named = config.get("target_parameters") or ()
        ends = [name for name in linear.modules for each in named if name.endswith(f".{each}")]
        return [name.replace("{}", "0") for name in ends]
    pattern = "|".join(map(_pattern, linear.modules))
    tensor = re.compile(rf"base_model\.model\.({pattern})\.lora_A\.weight")
    return [found[1] for found in map(tensor.fullmatch, tensors) if found]


def _settings_of(
    modules: Sequence[str], config: Dictionary[str, Any], *, folder: Path
) -> LoraSettings:
    module, *others = modules
    rank, alpha = _numbers_of(module, config)
    for other in others:
        if _numbers_of(other, config) != (rank, alpha):
            raise ValueError(
                f"{folder / ADAPTER_CONFIG_FILE} gives {module} and {other} different ranks or "
                "lora_alpha, expected the same for all layers and parts of a linear"
            )
    numbers = type(rank) is int and type(alpha) in (int, float)
    if not numbers or rank < 1 or not 0 < alpha < inf:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG_FILE} gives {module} the rank {rank!r:.80} and the "
            f"lora_alpha {alpha!r:.80}, expected a whole number and a number above 0"
        )
    return LoraSettings(rank=rank, alpha=alpha)


def _numbers_of(module: str, config: Dictionary[str, Any]) -> tuple[Any, Any]:
    """A module's rank and alpha as ``peft`` finds them, of whatever type the file has."""

    def of(patterns: str, default: Any) -> Any:
        for pattern, value in (config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    return of("rank_pattern", config.get("r")), of("alpha_pattern", config.get("lora_alpha"))


def module_settings(
    linears: Dictionary[str, LoraSettings | None],
) -> dict[str, LoraSettings]:
    """The same by modules, as YAML has it: of linears that differ in a module, the first counts.

    Targets are the shortest ends of paths that name the linears with adapters, and no others.
    """
    others = [name for name, settings in linears.items() if settings is None]
    targets: dict[str, list[str]] = {}
    found: dict[str, LoraSettings] = {}
    for name, settings in linears.items():
        if settings is None:
            continue
        module = name.partition(".")[0]
        parts = name.rpartition("}.")[2].split(".")  # behind the number of a layer or an expert
        ends = [".".join(parts[first:]) for first in reversed(range(len(parts)))]
        beside = [each for each in others if each.startswith(f"{module}.")]
        alone = (end for end in ends if not any(each.endswith(f".{end}") for each in beside))
        targets.setdefault(module, []).append(next(alone, ends[0]))
        found.setdefault(module, settings)
    return {
        module: replace(each, target_modules=tuple(dict.fromkeys(targets[module])))
        for module, each in found.items()
    }


def _unlike_lora(config: Dictionary[str, Any]) -> list[str]:
    """Reasons why adapters are not plain LoRA, and patterns that are not to be matched.

    The latter come with the folder, from whoever wrote it.
    """
    problems = [
        f"{key} is {value!r:.80}, which has no counterpart here"
        for key, value in config.items()
        if key not in _NEUTRAL.split() and (value not in _PLAIN[key] if key in _PLAIN else value)
    ]
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type is {config.get('peft_type')!r:.80}, expected 'LORA'")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            problems.append(f"{key} is {patterns!r:.80}, expected an object of modules' names")
            continue
        problems += [
            f"{key} names {pattern!r:.80}, expected a module's name, in which only \\d+ and . "
            "stand for something else"
            for pattern in patterns
            if not _SIMPLE.fullmatch(pattern)
        ]
    return problems


def _pattern(name: str) -> str:
    return re.escape(name).replace(re.escape("{}"), r"\d+")


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value
