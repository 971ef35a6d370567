"""What must be the same on all ranks at a run's start, and the check that it is."""

import json
import os
import platform
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from loongplug.checkpoint.checkpoint_files import TRACKER, check_latest
from loongplug.data.fingerprint import content_digest
from loongplug.parallel.rendezvous import comes, met_store
from loongplug.parallel.same_values import Values, require_same_values
from loongplug.platform.machine import version
from loongplug.training.arguments import ParsedArguments
from loongplug.training.checkpoints import has_checkpoint

# Flags that may differ from rank to rank. Paths are not among them: what ranks read and write has
# one name everywhere, also where each node has its own copy.
MAY_DIFFER = {"local_rank": "torchrun gives each process of a node its own number, and its device"}

_PACKAGES = ("loongplug", "torch", "megatron-core", "transformers", "tokenizers", "pillow")
WEIGHTS_BYTES = 64 * 2**20  # of all files of weights: so much is read of them, once a node


def require_same_start(parsed: ParsedArguments) -> None:
    """Return when all ranks were started alike; ValueError on every rank says what differs.

    Every rank enters, before it makes groups: ranks meet in their store. Nothing is compared
    where there is no such store or a default group exists, as among ranks that were forked from one
    process.
    """
    _compare(parsed.args, lambda store: start_values(parsed))


def require_same_data(args: Namespace, fingerprints: Mapping[str, Mapping[str, Any]]) -> None:
    """As :func:`require_same_start`, of data, by what they are for; they take longer to know."""
    _compare(args, lambda store: dict(_flat({"data": fingerprints}, separator=" ")))


def require_same_weights(args: Namespace) -> None:
    """As :func:`require_same_start`, of the weights to load, which one rank of a node looks at."""

    def of_node(store: Store) -> Values:
        node = f"node/{os.environ.get('GROUP_RANK')}/{socket.gethostname()}"
        if store.add(f"{node}/ranks", 1) == 1:
            store.set(node, json.dumps(_weights(args)))
        comes(store, node, seconds=60.0 * args.distributed_timeout_minutes)
        return dict(json.loads(store.get(node)))

    _compare(args, of_node)


def start_store(args: Namespace, *, purpose: str) -> Store | None:
    """torchrun's, with keys of this start: a process may run again. None where there is none."""
    if args.ranks == 1 or "MASTER_ADDR" not in os.environ:
        return None
    limit = timedelta(minutes=args.distributed_timeout_minutes)
    store = met_store(args.rank, limit=limit, purpose=purpose)
    return PrefixStore(str(store.add(f"starts/{args.rank}", 1)), store)


def _compare(args: Namespace, values: Callable[[Store], Values]) -> None:
    store = None if dist.is_initialized() else start_store(args, purpose="start")
    if store is not None:
        require_same_values(
            values(store),
            store=store,
            rank=args.rank,
            world_size=args.ranks,
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
        )


def _weights(args: Namespace) -> Values:
    """Size and digest of each file; of all together, at most WEIGHTS_BYTES are read."""
    if has_checkpoint(args):
        folders = {"--load": check_latest(Path(args.load), step=args.ckpt_step)}
    else:
        given = {"--load-hf": args.load_hf, "--load-lora": args.load_lora}
        folders = {flag: Path(folder) for flag, folder in given.items() if folder}
    files = {
        f"{flag} {file.name}": file
        for flag, folder in folders.items()
        for file in sorted(folder.iterdir())
        if file.is_file() and (flag == "--load" or file.suffix in (".safetensors", ".json"))
    }
    each = WEIGHTS_BYTES // 2 // max(1, len(files))  # of the head, which names tensors; of blocks
    return {
        name: f"{file.stat().st_size} bytes, digest {content_digest(file, most=each, head=each)}"
        for name, file in files.items()
    }


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
        tracker = Path(parsed.args.load) / TRACKER
        found[f"{TRACKER} in {parsed.args.load}"] = (
            tracker.read_text(errors="replace").strip() if tracker.is_file() else "not there"
        )
    for package in _PACKAGES:
        found[f"version of {package}"] = version(package) or "not installed"
    found["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    return found


def _flat(value: Mapping[str, Any], *, separator: str) -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            inner = _flat(item, separator=separator)
            yield from ((f"{key}{separator}{name}", text) for name, text in inner)
        else:
            yield key, _text(item)


def _text(value: Any) -> str:
    """The same in every process for the same value; an object with an address is its type."""
    if value is None or value in ([], ()):
        return "nothing"
    text = " ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
    return type(value).__name__ if " at 0x" in text else text
