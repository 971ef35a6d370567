"""A model that sees and hears, with encoders in different places, against a single rank."""

from pathlib import Path

import pytest
from verify_cases import Pair

from loongplug.verify.plan import Request
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


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_a_single_rank(name: str, tmp_path: Path) -> None:
    ranks, flags = CASES[name]
    command = ("--device", "cpu", "--model-name", "qwen2_5_omni_tiny", *flags)
    plan = plan_runs(Request(flags=command, scale="tiny", steps=1, ranks=ranks), folder=tmp_path)
    comparison = Pair(plan, tmp_path).compared()
    assert comparison.agrees, report(plan, comparison)
    trained = {each.module for each in comparison.tensors if each.what == "gradients"}
    assert trained >= {*HEARS, *SEES}
