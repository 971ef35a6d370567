"""Encoders with pipeline stages against a single rank, and what must not go unseen between them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from parity.encoder_faults import (
    lose_the_taps_between_stages,
    take_back_the_unit_before,
    take_states_of_the_unit_before,
)
from sweeps import sweep
from verify_cases import HEARS, OMNI, PP2, SEES, Pair, failing, made_plan
from verify_cases import lies as placed

lies = partial(placed, pp=2)


QWEN3, LLAVA, INTERNVL = "qwen3_vl_tiny", "llava_tiny", "internvl_tiny"
PP3 = ("--pipeline-model-parallel-size", "3")
MBS3 = ("--micro-batch-size", "3")
FROZEN = ("model.image_encoder.freeze=true",)

# Model, ranks in all, and flags. Sizes of the decoder | of the encoder are TP/PP/DP. Many more are
# cells of the parity matrix (tests/parity/placed.py).
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "figure-4a": (OMNI, 6, (*PP3, *lies(3), *lies(5, of="audio", pp=1))),
    "1/1/1|1/2/1-frozen-encoder": (LLAVA, 3, (*lies(1), *FROZEN)),
    "1/1/1|1/2/4-mbs3": (QWEN3, 9, (*MBS3, *lies(1, dp=4))),  # a replica without samples
    "1/1/1|1/2/1-uneven": (QWEN3, 3, (*lies(1), "model.image_encoder.stage_layers=[1,2]")),
    "1/2/1|1/2/1-tiles": (INTERNVL, 4, (*PP2, *lies(2))),
    "1/1/1|1/2/1-sounds": (OMNI, 4, (*lies(1, pp=1), *lies(2, of="audio"))),
    "1/1/1|1/2/1-first-layers-frozen": (
        QWEN3,
        3,
        (
            *(*lies(1), "--freeze-parameters", "image_encoder.patch_embed*"),
            *("image_encoder.position_embedding*", "image_encoder.blocks.layers.[01].*"),
        ),
    ),
    "1/1/1|1/2/1-last-layer-frozen": (
        QWEN3,
        3,
        (*lies(1), "--freeze-parameters", "image_encoder.blocks.layers.2.*"),
    ),
}
# Each kind of encoder once; one with taps is below.
FEW = (
    *("figure-4a", "1/1/1|1/2/1-frozen-encoder"),
    *("1/2/1|1/2/1-tiles", "1/1/1|1/2/1-sounds"),
)
STAGED = (QWEN3, 4, lies(2))


def pair_of(folder: Path, case: tuple[str, int, tuple[str, ...]]) -> Pair:
    model, ranks, flags = case
    return Pair(made_plan(folder, *flags, model=model, ranks=ranks, steps=1), folder)


@pytest.mark.parametrize("name", sweep(CASES, but=FEW))
def test_it_agrees_with_a_single_rank(name: str, tmp_path: Path) -> None:
    pair = pair_of(tmp_path, CASES[name])
    comparison = pair.agreeing()
    trained = {each.module for each in comparison.tensors if each.what == "gradients"}
    expected = SEES | (HEARS if CASES[name][0] == OMNI else set())
    frozen = {"image_encoder"} if "frozen-encoder" in name else set()
    assert trained >= expected - frozen
    assert not frozen & trained


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two replicas of the decoder, and an encoder of two stages with both taps on the first."""
    return pair_of(tmp_path_factory.mktemp("staged"), STAGED)


def test_they_agree_without_a_fault(staged: Pair) -> None:
    staged.agreeing()


@pytest.mark.parametrize("fault", [lose_the_taps_between_stages, take_back_the_unit_before])
def test_wrong_gradients_between_stages(staged: Pair, fault: Any) -> None:
    comparison = staged.compared(fault)
    assert failing(comparison, "gradients") == {"image_encoder"}
    assert not any(each.fails for each in comparison.losses)
    wrong = {each.name for each in comparison.tensors if each.what == "gradients" and each.fails}
    assert any(".blocks.1." in name for name in wrong)
    assert not any(".blocks.2." in name for name in wrong), "the last stage's are right"


def test_states_of_another_unit_between_stages(staged: Pair) -> None:
    comparison = staged.compared(take_states_of_the_unit_before)
    assert any(each.fails for each in comparison.losses)
    assert failing(comparison, "gradients") >= SEES
