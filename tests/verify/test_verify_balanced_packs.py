"""Packs that are split by their own samples, against a single rank that holds them whole."""

from pathlib import Path

import pytest
from parity.encoder_faults import place_features_by_a_zigzag
from parity.mutations import labels_shifted_after_the_split
from sweeps import sweep
from verify_cases import Pair, failing, made_plan

BALANCED = ("--packing", "--cp-balance", "lpt")
STAGES_AND_EXPERTS = (
    *("--context-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    *("--model-name", "qwen3_vl_moe_tiny", "--expert-model-parallel-size", "2"),
    *("--moe-aux-loss-coeff", "0.1", "--moe-router-load-balancing-type", "aux_loss"),
)


def test_stages_and_experts_with_balanced_packs_agree_with_a_single_rank(tmp_path: Path) -> None:
    """Each stage comes to the split by itself: labels on one, features on another."""
    plan = made_plan(tmp_path, *STAGES_AND_EXPERTS, *BALANCED, ranks=4, steps=1)
    pair = Pair(plan, tmp_path)
    pair.agreeing()


MODES = {
    "full separation": (4, "--pipeline-model-parallel-size", "2", "--enable-full-hetero-dp"),
    "heterogeneous DP": (
        4,
        *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--enable-encoder-hetero-dp"),
    ),
    "ranks of its own": (
        3,
        *("model.image_encoder.rank_offset=2", "model.image_encoder.data_parallel_size=1"),
    ),
}


@pytest.mark.parametrize("mode", sweep(MODES, but=["full separation", "ranks of its own"]))
def test_other_modes_with_balanced_packs_agree_with_a_single_rank(
    mode: str, tmp_path: Path
) -> None:
    """Encoders send each part the rows that the packs' own split gives it."""
    ranks, *flags = MODES[mode]
    assert isinstance(ranks, int)
    plan = made_plan(
        tmp_path, "--context-parallel-size", "2", *map(str, flags), *BALANCED, ranks=ranks
    )
    pair = Pair(plan, tmp_path)
    pair.agreeing()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("three")
    flags = ("--context-parallel-size", "3", *BALANCED)
    return Pair(made_plan(folder, *flags, ranks=3, steps=1), folder)


def test_balanced_packs_on_three_ranks_agree_with_a_single_rank(three: Pair) -> None:
    three.agreeing()


def test_features_of_another_part_of_the_row(three: Pair) -> None:
    comparison = three.compared(place_features_by_a_zigzag)
    assert any(each.fails for each in comparison.losses)
    assert "image_projector" in failing(comparison, "gradients")


def test_labels_that_are_shifted_after_the_split(three: Pair) -> None:
    """Wrong at the ends of a part's stretches alone; of a zigzag's few, none may be trained."""
    comparison = three.compared(labels_shifted_after_the_split)
    assert any(each.fails for each in comparison.losses)
    assert "text_decoder layers" in failing(comparison, "gradients")
