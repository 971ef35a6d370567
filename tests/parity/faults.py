"""Which suite of tests finds which built-in fault: the table of docs/parity_faults.md.

A fault is a function of a rank that changes what the rank runs. Each suite is run under each fault,
which every run of several ranks has and the single rank has not. What was run before stays in
runs/faults: a run that was ended goes on where it was.

    PYTHONPATH=tests python -m parity.faults [--fault NAME]... [--suite NAME]... [--minutes N]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FAULT = "LOONGPLUG_BUILT_IN_FAULT"  # in a suite's environment: module and name of its fault
TESTS = Path(__file__).resolve().parents[1]
SUITE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, by the test module that puts it in, and what goes wrong without a word."""

    name: str
    module: str
    trap: str


_RUNS, _VERIFY = "training.test_hetero_faults", "verify.test_verify_mutations"
FAULTS = (
    Fault(
        name="divide_by_the_replicas",
        module=_RUNS,
        trap="gradients of encoder replicas are averaged, not summed",
    ),
    Fault(name="swap_two_units", module=_RUNS, trap="units of one size arrive for each other"),
    Fault(
        name="drop_deepstack_gradients",
        module=_RUNS,
        trap="only the first stream of a unit's gradient travels back",
    ),
    Fault(
        name="finalize_too_early",
        module=_RUNS,
        trap="gradients are reduced before the encoder's are made",
    ),
    Fault(
        name="no_padding",
        module=_RUNS,
        trap="a rank without units does not go through its encoder",
    ),
    Fault(name="double_encoder", module=_VERIFY, trap="an entry's gradients times a number"),
    Fault(
        name="sum_norms_over_tp",
        module=_VERIFY,
        trap="gradients of replicated parameters are reduced once more over TP",
    ),
    Fault(name="swap_units", module=_VERIFY, trap="pixels of two microbatches change places"),
    Fault(
        name="drop_deepstack_gradient",
        module=_VERIFY,
        trap="deepstack's features are cut from the graph in the decoder",
    ),
    Fault(
        name="count_replicas_twice",
        module=_VERIFY,
        trap="the gradient norm counts what TP ranks have in common by each of them",
    ),
    Fault(name="start_apart", module=_VERIFY, trap="replicas start from other weights"),
    Fault(
        name="miss_tied_reduction",
        module=_VERIFY,
        trap="tied embeddings are not reduced between the first and the last stage",
    ),
    Fault(
        name="count_units_twice",
        module=_VERIFY,
        trap="the sum over encoder replicas that have all encoded every unit, not their mean",
    ),
    Fault(
        name="norm_by_the_decoders_group",
        module=_VERIFY,
        trap="which of an encoder's parameters count in the norm is asked of the decoder's ranks",
    ),
)
# What is run under each: files or tests below ``tests``.
SUITES: dict[str, tuple[str, ...]] = {
    "runs of two ranks": ("training/test_hetero_faults.py::test_without_a_fault_they_agree",),
    "verify": ("verify/test_verify_mutations.py::test_the_layouts_agree_without_a_fault",),
    "hetero TP": ("training/test_hetero_tp.py",),
    "hetero DP": ("training/test_hetero_dp.py",),
    "edges": ("training/test_hetero_edges.py",),
    "layouts": ("training/test_run.py",),
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a suite says under a fault: how many of its tests failed, and how pytest ended."""

    fault: str
    suite: str
    failed: int
    passed: int
    ended: str  # "", or why there are no numbers

    @property
    def cell(self) -> str:
        """As the table has it."""
        return self.ended or (
            f"**{self.failed}** of {self.failed + self.passed}"
            if self.failed
            else f"0 of {self.passed}"
        )


def run_suite(fault: Fault, suite: str) -> Found:
    """Run one suite in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "parity.put_in", "--no-header"]
    path = os.pathsep.join((str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, FAULT: f"{fault.module}:{fault.name}"}
    failed = passed = 0
    try:
        said = subprocess.run(
            [*command, *(str(TESTS / each) for each in SUITES[suite])],
            cwd=TESTS.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SUITE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        ended = "takes too long"
    else:
        ended = "" if said.returncode in (0, 1) else f"pytest ended with {said.returncode}"
        words = said.stdout.splitlines()[-1].replace(",", "").split() if said.stdout else []
        numbers = dict(zip(words[1:], words, strict=False))
        failed = int(numbers.get("failed", 0)) + int(numbers.get("error", numbers.get("errors", 0)))
        passed = int(numbers.get("passed", 0))
    return Found(fault=fault.name, suite=suite, failed=failed, passed=passed, ended=ended)


def known(folder: Path) -> dict[tuple[str, str], Found]:
    """What was run before, by fault and suite."""
    path = folder / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    results = [Found(**json.loads(line)) for line in lines]
    return {(each.fault, each.suite): each for each in results}


def page(results: dict[tuple[str, str], Found]) -> str:
    """The table, as Markdown."""
    lines = [
        "# Which tests find which built-in fault",
        "",
        "Made by `PYTHONPATH=tests python -m parity.faults`. A cell has how many tests of a suite",
        "fail under the fault; an empty one was not run.",
        "",
        f"| fault | what goes wrong | {' | '.join(SUITES)} |",
        f"| --- | --- |{' --- |' * len(SUITES)}",
    ]
    for fault in FAULTS:
        cells = [
            results[fault.name, suite].cell if (fault.name, suite) in results else ""
            for suite in SUITES
        ]
        lines.append(f"| `{fault.name}` | {fault.trap} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was not run yet, tell of each, and write the page; 1 where no suite finds one."""
    parser = argparse.ArgumentParser(prog="parity.faults", description=__doc__)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--fault", action="append", choices=names, help="only this one; repeatable")
    parser.add_argument("--suite", action="append", choices=SUITES, help="only this; repeatable")
    parser.add_argument("--minutes", type=float, help="begin no other after so many")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="runs/faults")
    parser.add_argument("--page", type=Path, default=Path("docs/parity_faults.md"))
    options = parser.parse_args(argv)
    chosen = [
        (fault, suite)
        for suite in options.suite or SUITES
        for fault in FAULTS
        if fault.name in (options.fault or names)
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    results, begun = known(options.folder), time.monotonic()
    for number, (fault, suite) in enumerate(chosen, start=1):
        if (fault.name, suite) in results:
            continue
        if options.minutes is not None and time.monotonic() - begun > 60 * options.minutes:
            break
        found = results[fault.name, suite] = run_suite(fault, suite)
        with (options.folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        print(f"{number}/{len(chosen)} {fault.name}, {suite}: {found.cell}", flush=True)
    options.page.write_text(page(results), encoding="utf-8")
    shown = {each.fault for each in results.values() if each.failed or each.ended}
    return int(bool({fault for fault, _ in results} - shown))


if __name__ == "__main__":
    raise SystemExit(main())
