"""Who asks for the order of a stage's passes: few, each for a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import loongplug

pytestmark = pytest.mark.quick

PRODUCT = Path(loongplug.__file__).parent
ORDERS = {"turns", "calls", "shortened", "get_schedule_table"}
# By the function or class that asks.
ASKS = {
    ("turns", "calls"): "the passes among what Megatron's schedule was seen to do",
    ("shortened", "turns"): "a short step that stands for a long one",
    ("events", "turns"): "the one walk through a rank's step, with the moments of its plans",
    ("stage_acts", "calls"): "programs of the clock, by what Megatron's schedule was seen to do",
    ("EstimatedStep", "shortened"): "chunks are traced in this order; it counts no step",
    ("decoder_passes", "turns"): "what drafts of streamed plans go through, until they go",
}
TESTS_ASK = {
    ("order", "turns"): "a few orders, written out",
    ("test_a_shorter_step_has_a_turn_like_each_of_a_long_one", "turns"): "it stands for a long one",
    ("test_a_shorter_step_has_a_turn_like_each_of_a_long_one", "shortened"): "the same",
    ("test_what_a_stage_sends_the_next_one_receives", "calls"): "the recorder",
    ("test_passes_go_on_beside_what_is_sent", "calls"): "the recorder",
    ("one_by_one", "turns"): "the clock, by a walk with no programs",
    ("Ranks", "calls"): "one queue, with the product's own messages between passes",
    ("rank_acts", "calls"): "more forwards ahead than any schedule has, and several neighbours",
}


def asks(path: Path) -> Iterator[tuple[str, str]]:
    """Each top-level definition of a file that calls one of the orders, and which."""
    text = path.read_text(encoding="utf-8")
    if not any(f"{each}(" in text for each in ORDERS):  # to parse takes long
        return
    tree = ast.parse(text)
    known = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    for imported in (each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)):
        known |= {each.name for each in imported.names}
    for top in tree.body:
        for each in ast.walk(top):
            called = each.func if isinstance(each, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in ORDERS & known:
                yield getattr(top, "name", "module"), called.id


def test_each_walk_over_a_stage_s_passes_has_a_reason() -> None:
    root = PRODUCT.parent
    for folders, reasons in (([PRODUCT, root / "benchmarks"], ASKS), ([root / "tests"], TESTS_ASK)):
        files = (path for folder in folders for path in folder.rglob("*.py"))
        assert {found for path in files for found in asks(path)} == reasons.keys(), folders
