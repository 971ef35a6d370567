"""What a dotted name stands for, where its package may be imported."""

import importlib
import re
from collections.abc import Sequence

_DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def trusted_object(name: str, *, packages: Sequence[str], cure: str) -> object:
    """What ``name`` (``package.module.name``) stands for; only ``packages`` are imported.

    Raises:
        ValueError: the name is in none of them, with ``cure``, or there is no such thing.
    """
    if _DOTTED_NAME.fullmatch(name) is None or not within(name, packages):
        where = f"is not in {' or '.join(packages)}" if packages else "is in no trusted package"
        raise ValueError(f"{name} {where}; {cure}")
    module_name, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} does not exist ({error})") from error


def within(name: str, packages: Sequence[str]) -> bool:
    """Whether a dotted name is of something below one of the packages."""
    return any(name.startswith(f"{package}.") for package in packages)
