"""Packs that are split by their own samples, against a single rank that holds them whole."""

import pytest
from parity.encoder_faults import place_features_by_a_zigzag
from parity.mutations import labels_shifted_after_the_split
from verify_cases import Pair, failing, made_plan

BALANCED = ("--packing", "--cp-balance", "lpt")


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
