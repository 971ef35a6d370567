"""Rows whose tokens lie on several ranks against a single rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from verify_cases import Pair, made_plan

from loongplug.training import rules
from loongplug.verify.report import report

CP2 = ("--context-parallel-size", "2")
CP3 = ("--context-parallel-size", "3")
TP2 = ("--tensor-model-parallel-size", "2")
SP = (*TP2, "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs may have what a rule refuses, here and in the ranks that are forked from here."""
    kept = tuple(rule for rule in rules.RULES if rule.name != "context-parallel")
    assert len(kept) == len(rules.RULES) - 1
    monkeypatch.setattr(rules, "RULES", kept)
    yield


CASES: dict[str, tuple[str, ...]] = {
    "cp2": CP2,
    "cp3-mbs2": (*CP3, "--micro-batch-size", "2"),
    "cp2-packed": (*CP2, "--packing"),
    "cp2-tp2-sp": (*CP2, *SP),
    "cp2-pp2-packed": (*CP2, *PP2, "--packing"),
    "cp2-tp2-encoder-tp1": (*CP2, *TP2, "model.image_encoder.tensor_model_parallel_size=1"),
    "cp3-p2p": (*CP3, "--cp-comm-type", "p2p"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_a_single_rank(name: str, demo: Path, tmp_path: Path) -> None:
    plan = made_plan(tmp_path, demo, *CASES[name], steps=1)
    comparison = Pair(plan, tmp_path).compared()
    print(report(plan, comparison))
    assert comparison.agrees, report(plan, comparison)
