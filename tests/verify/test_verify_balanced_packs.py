"""Packs that are split by their own samples, against a single rank that holds them whole."""

from pathlib import Path

import pytest
from parity.encoder_faults import place_features_by_a_zigzag
from parity.mutations import labels_shifted_after_the_split
from verify_cases import CP2, FULL, PP2, SEES, Pair, failing, lies, made_plan

BALANCED = ("--packing", "--cp-balance", "lpt")
# Ranks in all, and flags.
MODES = {"full separation": (4, (*PP2, *FULL)), "ranks of its own": (3, lies(2))}


@pytest.mark.parametrize("mode", MODES)
def test_other_modes_with_balanced_packs_agree_with_a_single_rank(
    mode: str, tmp_path: Path
) -> None:
    """Encoders send each part the rows that the packs' own split gives it."""
    ranks, flags = MODES[mode]
    plan = made_plan(tmp_path, *CP2, *flags, *BALANCED, ranks=ranks, steps=1)
    comparison = Pair(plan, tmp_path).agreeing()
    trained = {each.module for each in comparison.tensors if each.what == "gradients"}
    assert trained >= SEES


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
