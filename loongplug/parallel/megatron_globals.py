"""What Megatron keeps per process, as one module sees it: saved, loaded, and made new.

A snapshot covers

- every mutable global of ``megatron.core.parallel_state``: groups, lists of ranks, the sizes and
  ranks that are set by hand, the virtual stage, the global memory buffer. Which names there are
  is read from the installed module, not from a list;
- the RNG tracker of ``megatron.core.tensor_parallel.random``, as an object;
- the default generators of host and device. Modules that draw different numbers of random
  values (because they compute different units) must not disturb each other's generators, which
  have to agree among the ranks of each module's own tensor parallel group;
- the tracker of experts' metrics, which counts layers from 1 in every module.

What stays with the process as a whole, and why: docs/parallel_states.md.
"""

import copy
import importlib.util
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer.moe import moe_logging

from loongplug.platform import current_platform


def _values_at_start(module: ModuleType) -> dict[str, Any]:
    """The private values of a module, but for functions and modules, as its code begins with them.

    So Megatron names what may change while a process runs; a test holds that against its source.
    The values come from running the code once more, beside the module in use.
    """
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return {
        name: value
        for name, value in vars(fresh).items()
        if name.startswith("_")
        and not name.startswith("__")
        and not callable(value)
        and not isinstance(value, ModuleType)
    }


_AT_START = _values_at_start(parallel_state)

# The list by which Megatron sets the timeout of all groups of the process at once.
PROCESS_WIDE = frozenset({"_global_process_group_list"})

# What a module's snapshot holds of parallel_state.
STATE_NAMES = tuple(name for name in _AT_START if name not in PROCESS_WIDE)
_values_of = itemgetter(*STATE_NAMES)

# Other modules' globals that a snapshot covers: where, and the values at the start.
OTHER_GLOBALS: tuple[tuple[dict[str, Any], str, Any], ...] = (
    (vars(tensor_parallel_random), "_CUDA_RNG_STATE_TRACKER", None),
    (vars(tensor_parallel_random), "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False),
    (vars(moe_logging), "_MOE_METRICS_TRACKER", None),
)


class Snapshot:
    """One module's values of all that is covered, as they were when it was last in use."""

    __slots__ = ("_generators", "_globals", "_others", "_values")

    def __init__(self) -> None:
        """Take the values as they are now."""
        self._values: tuple[Any, ...] = ()
        self.save()

    def save(self) -> None:
        """Take the values as they are now."""
        values = _values_of(vars(parallel_state))
        # Nearly always as they were loaded: comparing costs less than a new dictionary.
        if values != self._values:
            self._values = values
            self._globals = dict(zip(STATE_NAMES, values, strict=True))
        self._others = [where[name] for where, name, _ in OTHER_GLOBALS]
        self._generators = _take_generators()

    def load(self) -> None:
        """Give Megatron these values."""
        vars(parallel_state).update(self._globals)
        for (where, name, _), value in zip(OTHER_GLOBALS, self._others, strict=True):
            where[name] = value
        _put_generators(self._generators)


def values_at_start() -> dict[str, Any]:
    """A new copy of what STATE_NAMES are before Megatron has been initialized."""
    return {name: copy.deepcopy(_AT_START[name]) for name in STATE_NAMES}


def load_start() -> None:
    """Give Megatron the values it starts with, and go on with generators of their own.

    What was there is lost unless a snapshot has it. Unlike ``destroy_model_parallel`` this
    leaves nothing behind, and destroys no process group.
    """
    vars(parallel_state).update(values_at_start())
    part_random_numbers()


def part_random_numbers() -> None:
    """Go on without a tracker, and with generators of its own; snapshots keep what was there."""
    for where, name, value in OTHER_GLOBALS:
        where[name] = value
    if current_platform().name == "cuda":  # the same numbers, in another object than was taken
        generator = _device_generator()
        generator.graphsafe_set_state(generator.clone_state())


def _take_generators() -> tuple[Any, ...]:
    """What :func:`_put_generators` takes.

    The host's state is copied. A device's is handed over as the object that its generator works
    on, so that neither taking nor putting waits for the device or copies.
    """
    host = torch.default_generator.get_state()  # [5056] uint8
    if current_platform().name != "cuda":
        return (host,)
    return (host, _device_generator().graphsafe_get_state())


def _put_generators(taken: tuple[Any, ...]) -> None:
    """Go on where the generators were when ``taken`` was taken, or last put and used since."""
    torch.default_generator.set_state(taken[0])
    if len(taken) > 1:
        _device_generator().graphsafe_set_state(taken[1])


def _device_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]
