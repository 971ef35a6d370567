"""Encoders on ranks of their own against a single rank, and what must not go unseen there."""

from pathlib import Path

import pytest
from parity.mutations import FAULTS
from verify_cases import SEES, TP2, VPP2, Pair, failing, lies, made_plan

ENCODER = "model.image_encoder"
MBS3 = ("--micro-batch-size", "3")

# Ranks in all, and flags. Sizes of the decoder | of the encoder are TP/PP/DP. Many more are cells
# of the parity matrix (tests/parity/placed.py).
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "2/1/1|1/1/1-split": (3, (*TP2, "--sequence-parallel", *lies(2))),
    "1/1/2|1/1/3-mbs3": (5, (*MBS3, *lies(2, dp=3))),
    "1/2/1|1/1/1-virtual": (3, (*VPP2, *lies(2))),
    "1/1/1|1/1/1-frozen-encoder": (2, (*lies(1), f"{ENCODER}.freeze=true")),
}


def pair_of(folder: Path, name: str, *more: str, steps: int = 1) -> Pair:
    ranks, flags = CASES[name]
    return Pair(made_plan(folder, *flags, *more, ranks=ranks, steps=steps), folder)


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_a_single_rank(name: str, tmp_path: Path) -> None:
    pair = pair_of(tmp_path, name)
    comparison = pair.agreeing()
    trained = {each.module for each in comparison.tensors if each.what == "gradients"}
    assert "image_projector" in trained
    assert ("image_encoder" in trained) == ("frozen-encoder" not in name)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A microbatch of two samples, of which each replica of the encoder makes one.

    Gradients are clipped.
    """
    folder = tmp_path_factory.mktemp("shared")
    flags = ("--micro-batch-size", "2", "--clip-grad", "0.01", *lies(1, dp=2))
    return Pair(made_plan(folder, *flags, ranks=3, steps=1), folder)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(tmp_path_factory.mktemp("split"), "2/1/1|1/1/1-split")


def test_they_agree_without_a_fault(shared: Pair) -> None:
    shared.agreeing()


@pytest.mark.parametrize(
    ("fault", "ratio"),
    [("mean_over_the_encoders_replicas", 0.5), ("clamp_tokens_on_encoder_ranks", None)],
)
def test_gradients_of_an_encoder_that_are_multiplied(
    shared: Pair, fault: str, ratio: float | None
) -> None:
    comparison = shared.compared(FAULTS[fault].put_in)
    wrong = [each for each in comparison.tensors if each.what == "gradients" and each.fails]
    assert {each.module for each in wrong} == SEES
    ratios = sorted(each.ratio for each in wrong)
    assert ratios[0] == pytest.approx(ratios[-1], rel=1e-2)
    assert ratios[0] == pytest.approx(ratio, rel=1e-3) if ratio else ratios[0] > 10


def test_a_norm_of_the_modules_that_a_rank_has(shared: Pair) -> None:
    comparison = shared.compared(FAULTS["norm_of_own_modules"].put_in)
    assert all(each.fails and each.found < each.expected for each in comparison.norms)
    # The step that Adam makes does not tell factors apart; its moments do.
    assert failing(comparison, "exp_avg") > SEES


def test_pieces_in_the_order_of_their_arrival(shared: Pair) -> None:
    comparison = shared.compared(FAULTS["take_pieces_in_order_of_arrival"].put_in)
    assert any(each.fails for each in comparison.losses)
    assert failing(comparison, "gradients") >= SEES


def test_rows_of_a_gradient_at_another_chunk_s_places(split: Pair) -> None:
    comparison = split.compared(FAULTS["place_gradients_mirrored"].put_in)
    assert failing(comparison, "gradients") == SEES
    assert not any(each.fails for each in comparison.losses)
