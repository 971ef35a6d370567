"""Which test of the cover finds which built-in fault: a table, in runs/faults/page.md.

The cover, ``tests/parity/cover.txt``, has few cheap tests that together find all faults. Each is
run under the faults whose place its ranks come by. What was run before stays in
runs/faults/cells.jsonl, so that a run that was ended goes on where it was; after a change of a test
or a fault, take its lines out, and for a new fault those of all tests without a fault.

    PYTHONPATH=tests python -m parity.faults [--fault NAME]... [--test TEST]...
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from parity.mutations import FAULTS

PLAN = "LOONGPLUG_BUILT_IN_FAULTS"  # for the plugin: which cells, and where the results go
TESTS = Path(__file__).resolve().parents[1]
COVER = Path(__file__).with_name("cover.txt")
PASSES = "passes"


@dataclass(frozen=True, kw_only=True)
class Found:
    """How a test ends under a fault; without a fault, which faults' places its ranks come by."""

    test: str
    fault: str
    how: str
    seconds: float
    reached: tuple[str, ...] = ()

    def line(self) -> str:
        """As the file of results has it."""
        return json.dumps(asdict(self)) + "\n"


Results = Mapping[tuple[str, str], Found]  # by test and fault


def read_cover() -> dict[str, str]:
    """The tests of the cover, and what each is kept for."""
    lines = COVER.read_text(encoding="utf-8").splitlines()
    split = (line.partition("  # ") for line in lines if not line.startswith("#"))
    return {test: kept_for for test, _, kept_for in split}


def known(folder: Path) -> dict[tuple[str, str], Found]:
    """What was run before; the last word counts."""
    path = folder / "cells.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    results = [Found(**json.loads(line)) for line in lines]
    return {(each.test, each.fault): each for each in results}


def run(cells: Sequence[tuple[str, str]], tests: Iterable[str], *, folder: Path) -> None:
    """Run these tests in one process, each under the faults of ``cells``, or without any."""
    path = os.pathsep.join((str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")))
    plan = {"cells": cells, "folder": str(folder.resolve())}
    # Whole functions: what the plugin adds to names is not known here.
    functions = dict.fromkeys(test.partition("[")[0] if cells else test for test in tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "parity.put_in", "--no-header"]
    subprocess.run(
        [*command, "--tb=line", *(str(TESTS / each) for each in functions)],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": path, PLAN: json.dumps(plan)},
        check=False,
    )


def found_by(results: Results, tests: Collection[str]) -> dict[str, set[str]]:
    """The faults that each of these tests finds."""
    found: dict[str, set[str]] = {test: set() for test in tests}
    for (test, fault), each in results.items():
        if test in found and fault in FAULTS and each.how != PASSES:
            found[test].add(fault)
    return found


def idle(found: Mapping[str, Collection[str]]) -> list[str]:
    """Tests that find nothing that no other one finds."""
    return [
        test
        for test, faults in found.items()
        if set(faults) <= set().union(*(found[each] for each in found if each != test))
    ]


def page(results: Results, tests: Mapping[str, str]) -> Iterator[str]:
    """The table's lines: of each fault, and of each test, with what it is kept for."""
    yield from (
        "# Which tests find which built-in fault",
        "",
        "Made by `PYTHONPATH=tests python -m parity.faults`, which runs what was not run yet. A",
        "fault is put into every rank of a run of several; the single rank, transformers or a",
        "formula say what is right. `fails`: numbers differ. `ends`: a rank ends with an error.",
        "`times out`: ranks wait for each other until the test's time is up. `.`: the test passes.",
        "Empty: its ranks do not come by the fault's place, or it can change nothing there.",
        "`?`: not run. `told in` is where notes on the design tell of the trap. Traps that no",
        "fault is are in tests/parity/not_built_in.md.",
        "",
        f"| fault | what goes wrong | told in | {' | '.join(map(str, range(1, len(tests) + 1)))} |",
        f"| --- | --- | --- |{' --- |' * len(tests)}",
    )
    for name, trap in FAULTS.items():
        cells = " | ".join(_word(results, test, name) for test in tests)
        yield f"| `{name}` | {trap.trap} | {trap.spec} | {cells} |"
    yield from ("", "| | test | seconds | finds | kept for |", "| --- | --- | --- | --- | --- |")
    found = found_by(results, tests)
    for number, (test, kept_for) in enumerate(tests.items(), start=1):
        plain = results.get((test, ""))
        seconds = "" if plain is None else f"{plain.seconds:.1f}"
        yield f"| {number} | `{test}` | {seconds} | {len(found[test])} | {kept_for} |"


def _word(results: Results, test: str, fault: str) -> str:
    found, plain = results.get((test, fault)), results.get((test, ""))
    if found is not None:
        return "." if found.how == PASSES else found.how
    return "?" if plain is None or fault in plain.reached else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was not run yet and write the page; 1 where a fault is found by none."""
    parser = argparse.ArgumentParser(prog="parity.faults", description=__doc__)
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this; repeatable")
    parser.add_argument(
        "--test", action="append", help="this one, as pytest calls it, not the cover; repeatable"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="runs/faults")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    tests = dict.fromkeys(options.test, "") if options.test else read_cover()
    if new := [test for test in tests if (test, "") not in known(options.folder)]:
        run([], new, folder=options.folder)
    results = known(options.folder)
    if broken := [test for test in tests if results[test, ""].how != PASSES]:
        print(f"These do not pass without a fault: {', '.join(broken)}")
        return 1
    cells = [
        (test, fault)
        for test in tests
        for fault in options.fault or FAULTS
        if (test, fault) not in results and fault in results[test, ""].reached
    ]
    if cells:
        run(cells, [test for test, _ in cells], folder=options.folder)
    results = known(options.folder)
    file = options.folder / "page.md"
    file.write_text("\n".join([*page(results, tests), ""]), encoding="utf-8")
    found = found_by(results, tests)
    missed = sorted(set(options.fault or FAULTS) - set().union(*found.values()))
    print(f"{file}: {len(missed)} faults are found by none: {', '.join(missed)}")
    if not options.fault and not options.test:
        print(f"Find nothing alone: {', '.join(idle(found))}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
