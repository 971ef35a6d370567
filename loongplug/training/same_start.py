"""What must be the same on all ranks at the start of a run, and the check that it is."""

import os
import platform
from argparse import Namespace
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from loongplug.checkpoint.tracker import TRACKER
from loongplug.parallel.failure import torchrun_store
from loongplug.parallel.same_values import Values, require_same_values
from loongplug.platform.machine import version
from loongplug.training.arguments import ParsedArguments

# Flags that may differ from rank to rank. Paths are not among them: what ranks read and write has
# one name everywhere, also where each node has its own copy.
MAY_DIFFER = {"local_rank": "torchrun gives each process of a node its own number, and its device"}

_PACKAGES = ("loongplug", "torch", "megatron-core")
_STORE_SECONDS = 60.0  # for one call; waits for other ranks have their own bound


def require_same_start(parsed: ParsedArguments) -> None:
    """Return when all ranks were started alike; raise on every rank otherwise.

    Every rank enters, before it makes groups: ranks meet in torchrun's store. Nothing is compared
    where there is no such store or a default group exists, as among ranks that were forked from one
    process.

    Raises:
        ValueError: the same on every rank: what differs, and on which ranks.
    """
    _compare(parsed.args, start_values(parsed))


def require_same_data(args: Namespace, fingerprints: Mapping[str, Mapping[str, Any]]) -> None:
    """As :func:`require_same_start`, of data, by what they are for; they take longer to know.

    When it returns, every rank has come here.
    """
    _compare(args, dict(_flat({"data": fingerprints}, separator=" ")))


def _compare(args: Namespace, values: Values) -> None:
    if args.ranks == 1 or dist.is_initialized() or "MASTER_ADDR" not in os.environ:
        return
    store = torchrun_store(timedelta(seconds=_STORE_SECONDS), purpose="start")
    start = store.add(f"starts/{args.rank}", 1)  # a process may run again
    require_same_values(
        values,
        store=PrefixStore(str(start), store),
        rank=args.rank,
        world_size=args.ranks,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )


def start_values(parsed: ParsedArguments) -> Values:
    """Checked flags, the model, what will be loaded, and versions, each as text."""
    settings = vars(parsed.args)
    found = {
        flag: _text(settings[name])
        for name, flag in parsed.options.items()
        if name in settings and name not in MAY_DIFFER
    }
    found.update(_flat(parsed.model_yaml, separator="."))  # as overrides have it
    if parsed.args.load:
        found[f"{TRACKER} in {parsed.args.load}"] = _content(Path(parsed.args.load) / TRACKER)
    for package in _PACKAGES:
        found[f"version of {package}"] = version(package) or "not installed"
    found["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    return found


def _flat(
    value: Mapping[str, Any], prefix: str = "", *, separator: str
) -> Iterator[tuple[str, str]]:
    """Names of the parts and their values."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from _flat(item, name + separator, separator=separator)
        else:
            yield name, _text(item)


def _text(value: Any) -> str:
    """The same in every process for the same value; an object of another kind is its type."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value)) or "nothing"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items())
    if value is None:
        return "nothing"
    if isinstance(value, str | int | float | torch.dtype | Path):
        return str(value)
    return type(value).__name__


def _content(file: Path) -> str:
    return file.read_text(errors="replace").strip() if file.is_file() else "not there"
