"""What must be the same on all ranks, at a start and of each row, and the check that it is."""

import json
import os
import platform
import re
import socket
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from loongplug.checkpoint.tracker import TRACKER, check_latest
from loongplug.data.dataset import Sample
from loongplug.data.fingerprint import content_digest
from loongplug.parallel.failure import met_store
from loongplug.parallel.same_values import Values, require_same_values
from loongplug.parallel.store_keys import comes
from loongplug.parallel.verdict import SharedFaultError
from loongplug.platform.machine import version
from loongplug.training.arguments import ParsedArguments
from loongplug.training.checkpoints import has_checkpoint

# Flags that may differ from rank to rank. Paths are not among them: what ranks read and write has
# one name everywhere, also where each node has its own copy.
MAY_DIFFER = {"local_rank": "torchrun gives each process of a node its own number, and its device"}

_PACKAGES = ("loongplug", "torch", "megatron-core", "transformers", "tokenizers", "pillow")
WEIGHTS_BYTES = 64 * 2**20  # of all files of weights: so much is read of them, once a node
_KEPT = 1000  # microbatches of a replica: more than a rank is ahead of another


def require_same_start(parsed: ParsedArguments) -> None:
    """Return when all ranks were started alike; raise on every rank otherwise.

    Every rank enters, before it makes groups: ranks meet in their store. Nothing is compared
    where there is no such store or a default group exists, as among ranks that were forked from one
    process.

    Raises:
        ValueError: the same on every rank: what differs, and on which ranks.
    """
    _compare(parsed.args, lambda store: start_values(parsed))


def require_same_data(args: Namespace, fingerprints: Mapping[str, Mapping[str, Any]]) -> None:
    """As :func:`require_same_start`, of data, by what they are for; they take longer to know.

    When it returns, every rank has come here.
    """
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


class SameRows:
    """Compares what ranks have read of each microbatch, in torchrun's store, and waits for nobody.

    The first rank to come leaves it there, the others find it. One that has read something else
    raises, and does not go on to what ranks do together. Those that have gone on agree, and end
    with it, as with any failure. It takes a call of the store for each microbatch.
    """

    def __init__(self, args: Namespace) -> None:
        self._store = start_store(args, purpose="rows")
        self._rank = args.rank
        self._args = args
        self._asked = 0  # how often what all ranks have

    def all_have(self, has: bool) -> bool:
        """Whether each rank has what it is asked for. Every rank asks, and waits for the others.

        Where they do not meet in a store, ranks are of one machine: the answer is the rank's own.
        """
        if self._store is None:
            return has
        self._asked += 1
        key = f"all have {self._asked}"
        self._store.add(f"{key}: without", not has)
        if self._store.add(f"{key}: asked", 1) == self._args.ranks:
            self._store.set(f"{key}: known", "")
        minutes = self._args.distributed_timeout_minutes
        comes(self._store, f"{key}: known", seconds=60.0 * minutes)
        return self._store.add(f"{key}: without", 0) == 0

    def __call__(
        self, stream: str, replica: int, index: int, samples: Sequence[Sample], begins: object
    ) -> None:
        """Compare a decoder replica's microbatch; of a pack, its place with all replicas', too.

        Each of these plans the packs of all. Raises SharedFaultError with the first row that
        differs, and two ranks.
        """
        self._compare(f"{stream}/{replica}", index, [_read(each) for each in samples], samples)
        if begins is not None:  # made of integers, whose hash is the same in every process
            place = f"in a pack behind rows with digest {hash(begins) & 0xFFFFFFFF:08x}"
            self._compare(f"{stream}/packs", index, [place], samples)

    def _compare(self, key: str, index: int, mine: list[str], samples: Sequence[Sample]) -> None:
        if self._store is None:
            return
        try:
            value = json.dumps([self._rank, mine])
            rank, theirs = json.loads(self._store.compare_set(f"{key}/{index}", "", value))
            if rank == self._rank:
                self._store.delete_key(f"{key}/{index - _KEPT}")
        except RuntimeError:  # the store is gone: so is what started the ranks
            self._store = None
            return
        for place, (here, there) in enumerate(zip_longest(mine, theirs, fillvalue="nothing")):
            if here != there:
                sample = samples[min(place, len(samples) - 1)]
                where = sample.where if sample.bad is None else sample.bad.message
                where = re.sub(r"(?s)^(.{150}).{6,}(.{130})$", r"\1 ... \2", where)
                said = (
                    f"{where}: {_said(here)} on rank {self._rank}, {_said(there)} on rank {rank}. "
                    "Ranks have to read the same of a row: give all of them the same media files."
                )
                raise SharedFaultError(said, fault="rows that ranks read differently", knows=0)


def _read(sample: Sample) -> str:
    """Tokens, and a digest of them and the sizes of media: short, since the store keeps many."""
    if sample.bad is not None:
        return f"left out ({sample.bad.kind})"
    sizes = str([medium.grid for medium in sample.extent.media]).encode()
    return f"{len(sample)}:{zlib.crc32(sizes, zlib.crc32(sample.input_ids.tobytes())):08x}"


def _said(read: str) -> str:
    tokens, _, digest = read.partition(":")
    return f"{tokens} tokens (digest {digest}, with sizes of media)" if digest else read
