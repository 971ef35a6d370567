"""Tensors inside what a module returns: tuples, lists, dictionaries and dataclasses."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor replaced by what ``function`` makes of it.

    Each tensor is given to ``function`` once, however often it occurs. What has nothing
    replaced in it comes back as the same object; anything else is a shallow copy of its own
    type. Objects of other kinds are left as they are, with the tensors in them.
    """
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = function(tensor)
        return made[id(tensor)]

    return _map(value, once)


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    items = _items(value)
    changed = {key: new for key, item in items.items() if (new := _map(item, function)) is not item}
    if not changed:
        return value
    if isinstance(value, tuple):
        parts = list((items | changed).values())
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    new = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, list | dict):
            new[key] = item
        else:
            object.__setattr__(new, key, item)  # a dataclass may be frozen
    return new


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return {}
