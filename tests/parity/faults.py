"""Which test finds which built-in fault: a table, and the cover, few tests that find all of them.

A few cheap tests are run under each fault whose place their ranks come by. What was run before
stays in runs/faults/cells.jsonl, so that a run that was ended goes on where it was; after a change
of a test or a fault, take its lines out, and for a new fault those of all tests without a fault.
The table goes to runs/faults/page.md. The cover goes to tests/parity/cover.txt, once all tests ran.

    PYTHONPATH=tests python -m parity.faults [--fault NAME]... [--test PART]... [--page-only]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from parity.mutations import FAULTS
from parity.not_built_in import NOT_HERE

PLAN = "LOONGPLUG_BUILT_IN_FAULTS"  # for the plugin: which cells, and where the results go
COMMAND = "PYTHONPATH=tests python -m parity.faults"
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


_TRAINING, _HF = "training/test_hetero", "test_step_agrees_with_transformers"
_LAYOUT = "test_losses_do_not_depend_on_the_layout"
_TOWER = "test_features_and_gradients_are_those_of_transformers"
_BALANCED = "test_balanced_packs_on_three_ranks_agree_with_a_single_rank"
# By what they are kept for: the way to fail that is a test's own.
CORE: dict[str, str] = {
    "hetero/test_exchange.py::test_units_come_and_gradients_return[tp2-split]": (
        "rows of units that no model makes: none, one, and shards without any"
    ),
    "hetero/test_carrier.py::test_every_row_goes_there_and_back_once[tp2-2-split]": (
        "the same between ranks of their own; pieces of samples"
    ),
    "parallel/test_module_ddp.py::test_each_part_sums_over_its_own_replicas": (
        "sums and factors of parts by numbers that one can add in the head"
    ),
    "parallel/test_module_ddp.py::test_one_factor_clips_all_gradients[True]": (
        "gradients behind the clipping, which a run shows through Adam alone"
    ),
    "parallel/test_module_ddp.py::test_what_is_not_finite_in_one_entry_is_found_on_every_rank"
    "[encoder-inf]": "a step that is left out with a loss scale, which the CPU's runs have not",
    "parallel/test_state_random.py::test_random_numbers_go_on_where_a_state_left_them": (
        "draws of each state; most runs draw nothing"
    ),
    "models/layers/test_experts.py::test_no_two_experts_start_alike_and_replicas_do[2]": (
        "weights that are drawn, where others are loaded"
    ),
    "schedule/test_plan_gradients.py::test_gradients_are_those_of_forward_and_backward"
    "[first-layers]": "the overlapped plan of layers, bit by bit",
    f"models/test_families_agreement.py::{_HF}[qwen3_vl-tp2-pp1-dp1-sequence_parallel]": (
        "transformers says what is right, tensor by tensor"
    ),
    f"models/test_families_agreement.py::{_HF}[qwen3_vl-tp1-pp1-dp2]": (
        "the same with rows of several samples"
    ),
    "models/test_qwen3_vl_moe_balancing.py::test_the_losses_are_those_of_the_formula_in_every_layout"
    "[tp2-pp1-dp1-sequence_parallel]": "a formula says what routers' losses are",
    "models/test_peft_agreement.py::test_step_agrees_with_peft[qwen3_vl-tp2-pp1-dp1]": (
        "peft says what is right with adapters"
    ),
    f"{_TRAINING}_faults.py::test_without_a_fault_they_agree[dp]": "heterogeneous DP, a whole run",
    f"{_TRAINING}_faults.py::test_without_a_fault_they_agree[full]": "full separation, a whole run",
    f"{_TRAINING}_faults.py::test_sigterm_in_a_phase_saves_and_ends_all[full-2-decoder]": (
        "what is left out or told twice where a run goes on"
    ),
    f"{_TRAINING}_edges.py::test_few_images_and_uneven_ones[one-text-dp-sp]": (
        "units of many sizes, cut by sequence shards"
    ),
    f"{_TRAINING}_edges.py::test_few_images_and_uneven_ones[one-text-full-overlap]": (
        "ranks without units, reductions that overlap"
    ),
    f"{_TRAINING}_edges.py::test_few_images_and_uneven_ones[all-but-one-text-full-one-unit]": (
        "a rank without any unit, whose reductions others wait for"
    ),
    f"{_TRAINING}_edges.py::test_bf16[full]": "weights of which an optimizer has copies",
    f"{_TRAINING}_edges.py::test_packs[dp-sp]": "packs, cut by sequence shards",
    "verify/test_verify_mutations.py::test_the_layouts_agree_without_a_fault": (
        "every tensor's gradient, heterogeneous TP, tied embeddings"
    ),
    "verify/test_verify_own_ranks.py::test_they_agree_without_a_fault": (
        "an encoder on ranks of its own, a whole run that is clipped"
    ),
    f"training/test_run.py::{_LAYOUT}[--micro-batch-size 1 --use-distributed-optimizer "
    "--overlap-grad-reduce-2]": "two replicas with data of their own",
    "verify/test_verify_streamed.py::test_rows_without_images_and_others_agree": (
        "pieces of microbatches, encoded and gone back between the decoder's passes"
    ),
    "training/test_run.py::test_frozen_modules_keep_their_weights[both]": (
        "weights that have to stay, bit by bit"
    ),
    f"training/test_run_experts.py::{_LAYOUT}[--expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type allgather --overlap-grad-reduce-2]": (
        "experts with data parallel groups of their own, a whole run"
    ),
    "training/test_lora_run.py::test_a_module_moves_by_its_multiple_of_the_learning_rate": (
        "rates of each module, by how far weights move"
    ),
    "training/test_recomputed_dropout.py::test_recompute_changes_nothing[adapters-layout2]": (
        "draws that have to come again"
    ),
    "training/test_offload_run.py::test_all_flags_together[tp2-bf16]": (
        "all that leaves for the host, bit by bit"
    ),
    "hetero/test_exchange.py::test_units_come_and_gradients_return[tp2-cp2-whole]": (
        "parts of a row that several ranks have"
    ),
    "models/layers/test_real_tokens.py::test_experts_get_real_tokens_alone[2-alltoall-plain]": (
        "how many tokens come to experts, which no other number shows"
    ),
    f"models/test_audio_transformer.py::{_TOWER}[omni-tp2]": (
        "transformers says what a tower of sounds makes of them, in pieces; bits of keys' bias"
    ),
    f"models/test_audio_transformer.py::{_TOWER}[qwen2_audio-tp2]": (
        "the same with what stands behind a sound"
    ),
    "models/test_patch_transformer.py::test_layouts_change_nothing[layout0-clip]": (
        "transformers says which layer's states are the features"
    ),
    "verify/test_verify_one_size.py::test_they_agree_without_a_fault": (
        "images of one size and tiles, whose units have one length"
    ),
    "verify/test_verify_encoder_stages.py::test_they_agree_without_a_fault": (
        "what goes from stage to stage of an encoder, and back"
    ),
    "verify/test_verify_two_encoders.py::test_they_agree_without_a_fault": (
        "two encoders beside each other"
    ),
    "verify/test_verify_context.py::test_it_agrees_with_a_single_rank[cp2-experts-packed]": (
        "parts of rows within the decoder, and what routers know of whole rows"
    ),
    f"verify/test_verify_balanced_packs.py::{_BALANCED}": "parts that are no zigzag's",
}


def known(folder: Path) -> dict[tuple[str, str], Found]:
    """What was run before, by test and fault; the last word counts."""
    path = folder / "cells.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    results = [Found(**json.loads(line)) for line in lines]
    return {(each.test, each.fault): each for each in results}


def run(
    cells: Sequence[tuple[str, str]],
    tests: Iterable[str],
    *,
    folder: Path,
    only_missed: bool = False,
) -> None:
    """Run these tests in one process, each under the faults of ``cells``, or without any.

    ``only_missed``: no fault that a test before has found.
    """
    path = os.pathsep.join((str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")))
    plan = {"cells": cells, "folder": str(folder.resolve()), "only_missed": only_missed}
    # Whole functions: what the plugin adds to names is not known here.
    functions = dict.fromkeys(test.partition("[")[0] if cells else test for test in tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "parity.put_in", "--no-header"]
    subprocess.run(
        [*command, "--tb=line", *(str(TESTS / each) for each in functions)],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": path, PLAN: json.dumps(plan)},
        check=False,
    )


def cover(found: Mapping[str, Collection[str]], seconds: Mapping[str, float]) -> list[str]:
    """Tests that together find all that any finds: the fewest seconds for each new fault first.

    ``found`` has each test's faults. None of them is there for what the others find.
    """
    left, chosen = set().union(*found.values()), []
    while left:
        best = min(
            (test for test in found if left & set(found[test])),
            key=lambda test: (seconds[test] / len(left & set(found[test])), test),
        )
        chosen.append(best)
        left -= set(found[best])
    for test in sorted(chosen, key=lambda test: -seconds[test]):
        others = [set(found[each]) for each in chosen if each != test]
        if set(found[test]) <= set().union(*others):
            chosen.remove(test)
    return sorted(chosen, key=lambda test: seconds[test])


def read_cover() -> list[str]:
    """The tests that the file of the cover names."""
    lines = COVER.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def write_cover(results: Mapping[tuple[str, str], Found]) -> None:
    """Write the file of the cover, in the order of the table."""
    chosen = cover(by_test(results), {test: results[test, ""].seconds for test in CORE})
    lines = ["# Tests that together find every built-in fault. Made by: " + COMMAND]
    lines += [test for test in CORE if test in chosen]
    COVER.write_text("\n".join(lines) + "\n", encoding="utf-8")


def by_test(results: Mapping[tuple[str, str], Found]) -> dict[str, set[str]]:
    """The faults that each test finds."""
    found: dict[str, set[str]] = {test: set() for test in CORE}
    for (test, fault), each in results.items():
        if test in CORE and fault in FAULTS and each.how != PASSES:
            found[test].add(fault)
    return found


def page(results: Mapping[tuple[str, str], Found]) -> str:
    """The table, as Markdown."""
    numbers = {test: number for number, test in enumerate(CORE, start=1)}
    seconds = {test: results[test, ""].seconds for test in CORE if (test, "") in results}
    found = {test: faults for test, faults in by_test(results).items() if test in seconds}
    chosen = cover(found, seconds)
    lines = [
        "# Which tests find which built-in fault",
        "",
        f"Made by `{COMMAND}`, which runs what was not run yet. A",
        "fault is put into every rank of a run of several; the single rank, transformers or a",
        "formula say what is right. `fails`: numbers differ. `ends`: a rank ends with an error.",
        "`times out`: ranks wait for each other until the test's time is up. `.`: the test passes.",
        "Empty: its ranks do not come by the fault's place, or it can change nothing there.",
        "`?`: not run. `told in` is where notes on the design tell of the trap.",
        "",
        f"| fault | what goes wrong | told in | {' | '.join(map(str, numbers.values()))} |",
        f"| --- | --- | --- |{' --- |' * len(numbers)}",
    ]
    for name, trap in FAULTS.items():
        cells = " | ".join(_word(results, test, name) for test in CORE)
        lines.append(f"| `{name}` | {trap.trap} | {trap.spec} | {cells} |")
    asked = {
        (test, fault)
        for test in seconds
        for fault in results[test, ""].reached
        if fault in FAULTS  # others were there once
    }
    total = sum(seconds[test] for test in chosen)
    lines += [
        "",
        f"{len(asked & results.keys())} of {len(asked)} cells were run.",
        "",
        "## The tests",
        "",
        f"{len(chosen)} of them, in bold, find every fault that any finds, in {total:.0f} s (as",
        "measured, on two cores with other work). The others are kept for what they are alone in.",
        "",
        "| | test | seconds | finds | kept for |",
        "| --- | --- | --- | --- | --- |",
    ]
    for test, number in numbers.items():
        shown = f"**{number}**" if test in chosen else str(number)
        lines.append(
            f"| {shown} | `{test}` | {seconds.get(test, 0):.1f} | {len(found.get(test, ()))} "
            f"| {CORE[test]} |"
        )
    lines += ["", "## Traps without a fault", "", "| trap | told in | why |", "| --- | --- | --- |"]
    lines += [f"| {trap} | {spec} | {why} |" for trap, spec, why in NOT_HERE]
    return "\n".join([*lines, ""])


def _word(results: Mapping[tuple[str, str], Found], test: str, fault: str) -> str:
    found, plain = results.get((test, fault)), results.get((test, ""))
    if found is not None:
        return "." if found.how == PASSES else found.how
    return "?" if plain is None or fault in plain.reached else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was not run yet, write page and cover; 1 where a fault is found by none."""
    parser = argparse.ArgumentParser(prog="parity.faults", description=__doc__)
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this; repeatable")
    parser.add_argument("--test", action="append", help="only those with this in their name")
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="runs/faults")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    tests = [
        test for test in CORE if not options.test or any(part in test for part in options.test)
    ]
    if not options.page_only:
        new = [test for test in tests if (test, "") not in known(options.folder)]
        if new:
            run([], new, folder=options.folder)
        for only_missed in (True, False):  # what matters most comes first
            results = known(options.folder)
            cells = [
                (test, fault)
                for test in tests
                for fault in options.fault or FAULTS
                if (test, fault) not in results and fault in results[test, ""].reached
            ]
            if cells:
                named = [test for test, _ in cells]
                run(cells, named, folder=options.folder, only_missed=only_missed)
    results = known(options.folder)
    (options.folder / "page.md").write_text(page(results), encoding="utf-8")
    if all((test, "") in results for test in CORE):
        write_cover(results)
    missed = sorted(FAULTS.keys() - set().union(*by_test(results).values()))
    if missed:
        print(f"found by none: {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
