"""Fuzzed faults, as many as wanted: see ``./scripts/fuzz.sh --help``."""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from queue import Empty
from typing import Any

import conftest  # noqa: F401 - the CPU platform, before the others import Megatron
from draws import Draw, drawn
from fuzzed_run import World, WrongEndError
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

FORK = multiprocessing.get_context("fork")


def main() -> None:
    """Exits with 1 when a draw ends otherwise than it has to."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="loongplug-fuzz-") as name:
        world = World(Path(name))
        with redirect_stdout(sys.stderr):
            world.weights()
        if options.draw:
            sys.exit(_one(world, Draw.from_json(options.draw)))
        sys.exit(_many(world, options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./scripts/fuzz.sh", description=__doc__)
    parser.add_argument("--draws", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="begin no draw after that long")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="draws at a time (default: %(default)s)"
    )
    parser.add_argument("--large", action="store_true", help="4 ranks in every third draw")
    parser.add_argument("--draw", metavar="JSON", help="run this one, as a failure has printed it")
    return parser.parse_args()


def _one(world: World, draw: Draw) -> int:
    try:
        ending = world.check(draw)
    except WrongEndError as error:
        print(error)
        return 1
    print(f"ends as it has to: {', '.join(ending.ways)}")
    print(ending.details)
    return 0


def _many(world: World, options: argparse.Namespace) -> int:
    numbers, results = FORK.Queue(), FORK.Queue()
    for number in range(options.draws):
        numbers.put(number)
    until = time.monotonic() + 60 * options.minutes if options.minutes else None
    workers = [
        FORK.Process(target=_work, args=(world, slot, numbers, results, options, until))
        for slot in range(options.jobs)
    ]
    console, begun = Console(), time.monotonic()
    seen: Counter[str] = Counter()
    wrong = 0
    for worker in workers:
        worker.start()
    columns = (TextColumn("fuzzing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("fuzzing", total=options.draws)
        while any(worker.is_alive() for worker in workers) or not results.empty():
            try:
                kind, fired, error = results.get(timeout=0.5)
            except Empty:
                continue
            bar.advance(task)
            if not console.is_terminal and (seen.total() + 1) % 20 == 0:
                console.print(f"{seen.total() + 1} of {options.draws}, {wrong} wrong")
            seen[f"{kind}{'' if fired else ' (not come to)'}"] += 1
            if error is not None:
                wrong += 1
                console.print(error, markup=False, highlight=False, soft_wrap=True)
    total, seconds = seen.total(), time.monotonic() - begun
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(seen.items()))
    console.print(
        f"{total} draws of seed {options.seed} in {seconds:.0f} s: {kinds}; {wrong} wrong"
    )
    return 1 if wrong or any(worker.exitcode for worker in workers) else 0


def _work(
    world: World,
    slot: int,
    numbers: Any,
    results: Any,
    options: argparse.Namespace,
    until: float | None,
) -> None:
    """Check draws, by their numbers, until there are none; what ranks print is left out."""
    world = world.beside(slot)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        while until is None or time.monotonic() < until:
            try:
                number = numbers.get_nowait()
            except Empty:
                break
            draw = drawn(random.Random(f"{options.seed} {number}").choice, large=options.large)
            error, fired = None, draw.fault.kind in ("none", "bad sample")
            try:
                fired |= world.check(draw).fired
            except WrongEndError as wrong:
                error = str(wrong)
            results.put((draw.fault.kind, fired, error))
    results.close()
    results.join_thread()
    os._exit(0)


if __name__ == "__main__":
    main()
