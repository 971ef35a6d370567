"""Which globals of Megatron's ``parallel_state`` change, read from the installed module."""

import copy
import dis
import importlib.util
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from megatron.core import parallel_state


def mutable_globals(module: ModuleType) -> dict[str, Any]:
    """The names that may change while a process runs, with the values that they start with.

    Those are the names that some function of the module assigns by a ``global`` statement, and
    its private values that are no functions, classes or modules, such as a dictionary that is
    changed in place. The values come from running the module's code once more, beside the
    module in use.
    """
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    names = set(_assigned_in_functions(fresh))
    names.update(
        name
        for name, value in vars(fresh).items()
        if name.startswith("_")
        and not name.startswith("__")
        and not callable(value)
        and not isinstance(value, ModuleType)
    )
    return {name: vars(fresh).get(name) for name in sorted(names)}


def _assigned_in_functions(module: ModuleType) -> Iterator[str]:
    # What an import elsewhere may have wrapped does not matter: this is the fresh module.
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        functions = vars(value).values() if isinstance(value, type) else (value,)
        for function in functions:
            code = getattr(function, "__code__", None)
            if code is not None:
                yield from _stored_globals(code)


def _stored_globals(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _stored_globals(constant)


_AT_START = mutable_globals(parallel_state)

# The list by which Megatron sets the timeout of all groups of the process at once.
PROCESS_WIDE = frozenset({"_global_process_group_list"})

# What a module's snapshot holds of parallel_state.
STATE_NAMES = tuple(name for name in _AT_START if name not in PROCESS_WIDE)


def values_at_start() -> dict[str, Any]:
    """A new copy of what STATE_NAMES are before Megatron has been initialized."""
    return {name: copy.deepcopy(_AT_START[name]) for name in STATE_NAMES}
