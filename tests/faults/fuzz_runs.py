"""Fuzzed faults, as many as wanted: see ``./scripts/fuzz.sh --help``."""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from queue import Empty
from typing import Any

import conftest  # noqa: F401 - the CPU platform, before the others import Megatron
from attempts import ENDING_SECONDS, RUN_SECONDS
from drawn_options import MODELS
from drawn_placements import DrawnPlacement, drawn_placements
from draws import Draw, drawn
from fuzzed_run import WrongEndError
from placed_steps import play
from ranks import RankError, run_ranks
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tally import ENOUGH, Tally
from world import World

FORK = multiprocessing.get_context("fork")
# A draw is up to three runs: its reference, itself, and the run that goes on.
DRAW_SECONDS = 4 * (RUN_SECONDS + ENDING_SECONDS)
PATIENCE = 3600.0  # of all drawn placements; each has a bound of its own
WRONG_ENOUGH = 10  # to look at; when all runs hang, more would take hours


def main() -> None:
    """Exits with 1 when a draw ends otherwise than it has to."""
    options = _options()
    if options.placements or options.placement:
        sys.exit(_placements(options))
    with tempfile.TemporaryDirectory(prefix="loongplug-fuzz-", ignore_cleanup_errors=True) as name:
        world = World(Path(name))
        if options.draw:
            sys.exit(_one(world, Draw.from_json(options.draw)))
        with redirect_stdout(sys.stderr):
            for model in MODELS:
                world.weights(model)
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
    parser.add_argument(
        "--placements", type=int, metavar="N", help="N placements of encoders instead, without runs"
    )
    parser.add_argument("--placement", metavar="JSON", help="this one, as a failure has printed it")
    return parser.parse_args()


def _placements(options: argparse.Namespace) -> int:
    """Steps of drawn placements, most of them on four ranks."""
    if options.placement:
        draws = {0: [DrawnPlacement.from_json(options.placement)]}
    else:
        draws = drawn_placements(options.placements, seed=options.seed)
    begun = time.monotonic()
    for each in draws.values():
        try:
            taken = run_ranks(play, max(draw.ranks for draw in each), draws=each, timeout=PATIENCE)
        except RankError as error:
            print(f"fuzz: error: {error}")
            return 1
        print(f"{len(each)} placements: {sum(taken)} rows came where they belong", flush=True)
    print(f"{time.monotonic() - begun:.0f} s of seed {options.seed}; none wrong")
    return 0


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
    taken, results = FORK.Value("i", 0), FORK.Queue()
    until = time.monotonic() + 60 * options.minutes if options.minutes else None
    workers = [
        FORK.Process(target=_work, args=(world, slot, taken, results, options, until))
        for slot in range(options.jobs)
    ]
    console, begun, tally = Console(), time.monotonic(), Tally()
    for worker in workers:
        worker.start()
    try:
        stalled = _count(tally, results, workers, console=console, draws=options.draws)
    finally:
        for worker in workers:  # its ranks end with it
            worker.kill()
    seconds = time.monotonic() - begun
    _show(tally, console)
    console.print(
        f"{tally.total} draws of seed {options.seed} in {seconds:.0f} s; {tally.wrong} wrong"
    )
    failures = shortcomings(tally, whole=tally.total >= ENOUGH) + stalled
    if tally.total < options.draws and not (options.minutes or failures):
        failures = [f"{tally.total} of {options.draws} draws have a result"]
    for failure in failures:
        console.print(f"fuzz: error: {failure}", markup=False, highlight=False)
    return 1 if failures else 0


def _count(
    tally: Tally, results: Any, workers: list[Any], *, console: Console, draws: int
) -> list[str]:
    """Take results into ``tally`` until the workers are done; gives what is wrong with these."""
    heard = time.monotonic()
    columns = (TextColumn("fuzzing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("fuzzing", total=draws)
        while any(worker.is_alive() for worker in workers) or not results.empty():
            try:
                draw, ending, error = results.get(timeout=0.5)
            except Empty:
                if time.monotonic() - heard > DRAW_SECONDS:
                    return [f"no draw has ended for {DRAW_SECONDS:.0f} s"]
                continue
            heard = time.monotonic()
            tally.add(draw, ending)
            bar.advance(task)
            if error is not None:
                console.print(error, markup=False, highlight=False, soft_wrap=True)
            if not console.is_terminal and tally.total % 20 == 0:
                console.print(f"{tally.total} of {draws}, {tally.wrong} wrong")
            if tally.wrong >= WRONG_ENOUGH:
                return [f"ended after {tally.total} draws"]
    codes = [worker.exitcode for worker in workers if worker.exitcode]
    return [f"a job has ended with code {code}" for code in codes]


def _show(tally: Tally, console: Console) -> None:
    console.print(tally.table())
    console.print(tally.drawn_options(), highlight=False, soft_wrap=True)


def shortcomings(tally: Tally, *, whole: bool) -> list[str]:
    """Why the fuzz fails; ``whole``: there were enough draws to have come to everything."""
    wrong = [f"{tally.wrong} draws end otherwise than they have to"] if tally.wrong else []
    never = tally.never() if whole else []
    return wrong + [f"{tally.total} draws have never come to {each}" for each in never]


def _work(
    world: World,
    slot: int,
    taken: Any,
    results: Any,
    options: argparse.Namespace,
    until: float | None,
) -> None:
    """Check draws, by their numbers, until there are none; what ranks print is left out."""
    world = world.beside(slot)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        while until is None or time.monotonic() < until:
            with taken.get_lock():
                number = taken.value
                taken.value += 1
            if number >= options.draws:
                break
            draw = drawn(random.Random(f"{options.seed} {number}").choice, large=options.large)
            ending, error = None, None
            try:
                ending = replace(world.check(draw), details="")
            except WrongEndError as wrong:
                error = str(wrong)
            results.put((draw, ending, error))
    results.close()
    results.join_thread()
    os._exit(0)


if __name__ == "__main__":
    main()
