"""A model that sees and hears, with encoders in different places, against a single rank."""

from pathlib import Path

import pytest
from ranks import run_ranks
from verify_cases import Pair

from loongplug.training.run import run
from loongplug.verify.plan import Plan, Request
from loongplug.verify.report import report
from loongplug.verify.runs import plan_runs

HEARS, SEES = {"audio_encoder", "audio_projector"}, {"image_encoder", "image_projector"}
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")


def lies(encoder: str, offset: int) -> str:
    return f"model.{encoder}.rank_offset={offset}"


# Ranks in all, and flags.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "sounds-apart": (2, (lies("audio_encoder", 1),)),
    "images-apart-sounds-separated": (
        3,
        (*PP2, lies("image_encoder", 2), "model.audio_encoder.mode=full_hetero_dp"),
    ),
    "sounds-apart-images-in-groups": (
        3,
        (*TP2, lies("audio_encoder", 2), "model.image_encoder.mode=encoder_hetero_dp"),
    ),
    "both-apart": (3, (lies("audio_encoder", 1), lies("image_encoder", 2))),
}


def planned(name: str, folder: Path) -> Plan:
    ranks, flags = CASES[name]
    command = ("--device", "cpu", "--model-name", "qwen2_5_omni_tiny", *flags)
    return plan_runs(Request(flags=command, scale="tiny", steps=1, ranks=ranks), folder=folder)


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_a_single_rank(name: str, tmp_path: Path) -> None:
    plan = planned(name, tmp_path)
    comparison = Pair(plan, tmp_path).compared()
    assert comparison.agrees, report(plan, comparison)
    trained = {each.module for each in comparison.tensors if each.what == "gradients"}
    assert trained >= {*HEARS, *SEES}


def losses_of(rank: int, *, flags: list[str]) -> list[float]:
    return [step.loss for step in run(flags, verified=True)]


@pytest.mark.slow
def test_a_run_goes_on_where_both_lie_with_the_decoder_and_back(tmp_path: Path) -> None:
    """With samples that may be left out: both encoders tell of theirs."""
    plan, kept = planned("images-apart-sounds-separated", tmp_path), str(tmp_path / "run")
    more = ["--lr-decay-style", "constant", "--bad-sample", "skip", "--eval-iters", "0"]
    layout, alone = [*plan.layout, *more], [*plan.reference, *more]

    def losses(flags: list[str], *own: str, ranks: int) -> list[float]:
        found: list[float] = run_ranks(losses_of, ranks, flags=[*flags, *own], timeout=120.0)[0]
        return found

    expected = losses(alone, "--train-iters", "4", ranks=1)
    saves = ("--save", kept, "--save-interval", "1")
    goes_on = ("--load", kept, *saves, "--train-iters")
    found = losses(layout, *saves, "--train-iters", "2", ranks=plan.ranks)
    found += losses(alone, *goes_on, "3", ranks=1)
    found += losses(layout, *goes_on, "4", ranks=plan.ranks)
    assert found == pytest.approx(expected, rel=2e-5)
