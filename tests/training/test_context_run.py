"""Whole runs on context parallel ranks, which end, evaluate and go on on other numbers of ranks."""

import json
from pathlib import Path

import pytest
from compared_runs import Steps, same, train
from tensor_files import assert_same_weights

from loongplug.observe.trace_file import read_folder

SAVES = ("--use-distributed-optimizer", "--save-interval", "1")


def test_a_run_goes_on_on_other_numbers_of_ranks(
    flags: list[str], demo: Path, tmp_path: Path
) -> None:
    evaluated = ("--valid-data-path", str(demo / "test.jsonl"), "--eval-iters", "1")
    weights = str(tmp_path / "weights")
    train(flags, "--lr", "0", "--train-iters", "1", "--save-hf", weights)
    flags = [*flags, "--seq-length", "84", "--load-hf", weights, *evaluated, *SAVES]

    def run(steps: int, folder: str, *more: str, ranks: int = 1) -> Steps:
        kept = (
            "--save",
            str(tmp_path / folder),
            "--metrics-json",
            str(tmp_path / f"{folder}.json"),
        )
        split = ("--context-parallel-size", str(ranks))
        return train(flags, "--train-iters", str(steps), *kept, *split, *more, ranks=ranks)

    expected = run(3, "alone")
    goes_on = ("--load", str(tmp_path / "moved"))
    found = run(1, "moved", "--save-hf", str(tmp_path / "3"), ranks=3)
    for ranks in (1, 2):  # nothing is left to train
        run(1, "moved", *goes_on, "--save-hf", str(tmp_path / f"{ranks}"), ranks=ranks)
        assert_same_weights(tmp_path / "3", tmp_path / f"{ranks}")
    found += run(2, "moved", *goes_on, ranks=1)
    full = ("--enable-full-hetero-dp", "--trace", str(tmp_path / "trace"))
    found += run(3, "moved", *goes_on, *full, ranks=2)
    assert same(found, expected)
    labels = [each.label() for each in read_folder(tmp_path / "trace")]
    assert labels == ["0 tp0 cp0 pp0 dp0", "1 tp0 cp1 pp0 dp0"]
    moved, alone = (
        json.loads((tmp_path / f"{name}.json").read_text())["valid_loss"]
        for name in ("moved", "alone")
    )
    assert moved == pytest.approx(alone, rel=2e-5)
