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
    ("EstimatedStep", "turns"): "the bytes of each turn, where passes are traced one by one",
    ("decoder_passes", "turns"): "what drafts of streamed plans go through, until they go",
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
    folders = (PRODUCT, PRODUCT.parent / "benchmarks")
    files = (path for folder in folders for path in folder.rglob("*.py"))
    assert {found for path in files for found in asks(path)} == ASKS.keys()
