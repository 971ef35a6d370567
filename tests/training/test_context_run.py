"""Whole runs on context parallel ranks, which end, evaluate and go on on other numbers of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import Steps, same, train
from parity.mutations import around
from ranks import run_ranks
from torch import Tensor

from loongplug.observe.trace_file import read_folder
from loongplug.training.run import run
from loongplug.verify.replicas import digest

SAVES = ("--use-distributed-optimizer", "--save-interval", "1")


def test_a_run_goes_on_on_other_numbers_of_ranks(
    flags: list[str], weights: str, demo: Path, tmp_path: Path
) -> None:
    evaluated = ("--valid-data-path", str(demo / "test.jsonl"), "--eval-iters", "1")
    flags = [*flags, "--seq-length", "84", "--load-hf", weights, *evaluated, *SAVES]

    def saving(steps: int, folder: str, *more: str, ranks: int = 1) -> Steps:
        kept = (
            "--save",
            str(tmp_path / folder),
            "--metrics-json",
            str(tmp_path / f"{folder}.json"),
        )
        split = ("--context-parallel-size", str(ranks))
        return train(flags, "--train-iters", str(steps), *kept, *split, *more, ranks=ranks)

    expected = saving(3, "alone")
    goes_on = ("--load", str(tmp_path / "moved"))
    found = saving(1, "moved", ranks=3)
    found += saving(2, "moved", *goes_on, ranks=1)
    full = ("--enable-full-hetero-dp", "--trace", str(tmp_path / "trace"))
    found += saving(3, "moved", *goes_on, *full, ranks=2)
    assert same(found, expected)
    labels = [each.label() for each in read_folder(tmp_path / "trace")]
    assert labels == ["0 tp0 cp0 pp0 dp0", "1 tp0 cp1 pp0 dp0"]
    moved, alone = (
        json.loads((tmp_path / f"{name}.json").read_text())["valid_loss"]
        for name in ("moved", "alone")
    )
    assert moved == pytest.approx(alone, rel=2e-5)


def dropped(rank: int, *, flags: list[str], draws: int = 0) -> list[int]:
    """Digests of what an encoder's adapters are given, with what is dropped of it.

    ``draws``: so many more random numbers are drawn by a rank for each one before it.
    """
    digests: list[int] = []

    def noted(original: Any, self: Any, x: Tensor) -> Tensor:
        torch.rand(rank * draws)
        kept = original(self, x)
        assert not kept.all(), "something is dropped"
        digests.append(digest(kept))
        return kept

    around("loongplug.models.lora.adapter:Adapter._dropped", noted)
    run(flags)
    return digests


def test_an_encoder_s_adapters_drop_the_same_on_all_ranks_of_a_row(flags: list[str]) -> None:
    """Each encodes all images: otherwise parts of one row would see other features."""
    drops = [
        f"+model.{module}.lora.{key}"
        for module in ("image_encoder", "image_projector")
        for key in ("rank=4", "dropout=0.5")
    ]
    given = [*flags, "--train-iters", "2", "--context-parallel-size", "2", *drops]
    found, other = run_ranks(dropped, 2, flags=given)
    assert found == other
    assert len({*found}) > 2 * 4  # of each step's microbatches
    found, other = run_ranks(dropped, 2, flags=given, draws=1)
    assert found != other
