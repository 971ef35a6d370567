"""Ranks compare what they were started with, before they make groups.

Ranks that disagree would train something else each, wait for each other forever, or die in a
collective. Each rank leaves a digest of its values in torchrun's store; the values themselves once
for each digest. The last rank to come reads values where digests differ, and writes the answer,
which all ranks read. The others call the store some six times, however many ranks there are.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from torch.distributed import Store

from loongplug.parallel.rendezvous import comes

SHOWN = 20

Values = Mapping[str, str]  # by the name that a user knows them by

_ARRIVED, _KINDS, _ANSWER = "arrived", "kinds", "answer"
_SAME = "same"


def require_same_values(
    values: Values, *, store: Store, rank: int, world_size: int, timeout: timedelta
) -> None:
    """Return on every rank when all have the same ``values``; raise on every rank otherwise.

    Every rank enters. A rank that comes late is waited for, ``timeout`` at most.

    Raises:
        ValueError: the same on every rank: names, values, and who has them; or who never came.
    """
    text = json.dumps(values, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    store.set(f"digest/{rank}", digest)
    if store.add(f"kind/{digest}", 1) == 1:
        store.set(f"values/{digest}", text)
        store.add(_KINDS, 1)
    if store.add(_ARRIVED, 1) == world_size:
        store.set(_ANSWER, _answer(store, range(world_size)))
    if not comes(store, _ANSWER, seconds=timeout.total_seconds()):
        there = [each for each in range(world_size) if store.check([f"digest/{each}"])]
        missing = {*range(world_size)}.difference(there)
        who = name_ranks(missing) if missing else "a rank"
        late = (
            f"{who} did not come within the time that ranks wait for each other "
            "(--distributed-timeout-minutes); see why, or allow more"
        )
        found = _answer(store, there)
        raise ValueError(late if found == _SAME else f"{late}\nthe others: {found}")
    answer = store.get(_ANSWER).decode()
    if answer != _SAME:
        raise ValueError(answer)


def differences(found: Mapping[int, Values]) -> list[str]:
    """A line for each name whose values differ between the ranks: the values, and their ranks."""
    lines = []
    names = dict.fromkeys(name for values in found.values() for name in values)
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, values in sorted(found.items()):
            ranks.setdefault(values.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            said = "; ".join(f"{value} on {name_ranks(who)}" for value, who in ranks.items())
            lines.append(f"{name}: {said}")
    return lines


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``, in ascending order."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def _answer(store: Store, ranks: Sequence[int]) -> str:
    if store.add(_KINDS, 0) == 1:
        return _SAME
    digests = {rank: _text(store, f"digest/{rank}") for rank in ranks}
    values = {each: json.loads(_text(store, f"values/{each}")) for each in {*digests.values()}}
    lines = differences({rank: values[digest] for rank, digest in digests.items()})
    if len(lines) > SHOWN:
        lines = [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]
    return "\n  ".join(
        (
            "ranks were started differently; give all of them one command line, one set of files "
            "and one set of packages:",
            *lines,
        )
    )


def _text(store: Store, key: str) -> str:
    return str(store.get(key).decode())
