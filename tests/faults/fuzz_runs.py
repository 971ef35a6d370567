"""Fuzzed faults, as many as wanted: see ``./scripts/fuzz.sh --help``."""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import conftest  # noqa: F401 - the CPU platform, before the others import Megatron
from attempts import ENDING_SECONDS, RUN_SECONDS, Ending
from drawn_cells import MODELS
from drawn_placements import DrawnPlacement, drawn_placements
from draws import Draw, drawn
from fuzzed_run import WrongEndError
from placed_steps import play
from ranks import RankError, run_ranks
from rich.console import Console
from tally import Tally
from world import World

# A draw is up to three runs: its reference, itself, and the run that goes on.
DRAW_SECONDS = 4 * (RUN_SECONDS + ENDING_SECONDS)
PATIENCE = 3600.0  # of all drawn placements; each has a bound of its own
WRONG_ENOUGH = 10  # to look at; when all runs hang, more would take hours
TOLD_EVERY = 20  # draws

_GIVEN: list[Any] = []  # in a job: the world, the options, and until when draws begin
Checked = tuple[Draw, Ending | None, str]  # with what is wrong, for a draw that ends otherwise


def main() -> None:
    """Exits with 1 when a draw ends otherwise than it has to."""
    options = _options()
    if options.placements or options.placement:
        sys.exit(_placements(options))
    with tempfile.TemporaryDirectory(prefix="loongplug-fuzz-", ignore_cleanup_errors=True) as name:
        world = World(Path(name))
        if options.draw:
            _, ending, wrong = _checked(world, Draw.from_json(options.draw))
            print(wrong or f"ends as it has to: {', '.join(ending.ways)}\n{ending.details}")
            sys.exit(bool(wrong))
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


def _checked(world: World, draw: Draw) -> Checked:
    """How a draw ends; what ranks print is left out."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            return draw, world.check(draw), ""
        except WrongEndError as error:
            return draw, None, str(error)


def _begin(*given: Any) -> None:
    """A job's process, which has this from the driver by its fork."""
    _GIVEN[:] = given


def _by_number(number: int) -> Checked | None:
    """A draw of the fuzz, in a job's process; None where time is over."""
    world, options, until = _GIVEN
    if time.monotonic() > until:
        return None
    draw = drawn(random.Random(f"{options.seed} {number}").choice, large=options.large)
    _, ending, wrong = _checked(world.beside(os.getpid()), draw)
    return draw, ending and replace(ending, details=""), wrong


def _many(world: World, options: argparse.Namespace) -> int:
    console, begun, tally = Console(), time.monotonic(), Tally()
    ended: SimpleQueue[Future[Checked | None]] = SimpleQueue()
    stalled: list[str] = []
    until = begun + 60 * options.minutes if options.minutes else inf
    jobs = ProcessPoolExecutor(
        options.jobs,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(world, options, until),
    )
    with jobs:
        for number in range(options.draws):
            jobs.submit(_by_number, number).add_done_callback(ended.put)
        for _ in range(options.draws):
            try:
                checked = ended.get(timeout=DRAW_SECONDS).result()
            except Empty:
                stalled = [f"no draw has ended for {DRAW_SECONDS:.0f} s"]
                for job in multiprocessing.active_children():  # its ranks end with it
                    job.kill()
                break
            if checked is None:
                continue
            draw, ending, wrong = checked
            tally.add(draw, ending)
            if wrong:
                console.print(wrong, markup=False, highlight=False, soft_wrap=True)
            if tally.total % TOLD_EVERY == 0:
                console.print(f"{tally.total} of {options.draws}, {tally.wrong} wrong")
            if tally.wrong >= WRONG_ENOUGH:
                jobs.shutdown(cancel_futures=True)
                break
    console.print(tally.table())
    console.print(tally.drawn_options(), highlight=False, soft_wrap=True)
    seconds = time.monotonic() - begun
    console.print(
        f"{tally.total} draws of seed {options.seed} in {seconds:.0f} s; {tally.wrong} wrong"
    )
    failures = tally.shortcomings() + stalled
    for failure in failures:
        console.print(f"fuzz: error: {failure}", markup=False, highlight=False)
    return bool(failures)


if __name__ == "__main__":
    main()
