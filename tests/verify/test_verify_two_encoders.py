"""A model that sees and hears: each encoder, where and as it wants, agrees with a single rank; what
goes wrong with one encoder is found, and it is that one's.
"""

from pathlib import Path
from typing import Any

import pytest
from parity.built_in import around
from parity.encoder_faults import lose_the_gradient_of_sounds, turn_the_rows_of_sounds
from ranks import run_ranks
from sweeps import sweep
from torch import Tensor
from verify_cases import HEARS, OMNI, PP2, SEES, TP2, VPP2, Mutation, Pair, failing, lies, made_plan

from loongplug.training.run import run
from loongplug.verify.plan import Plan

OF_STEP = "loongplug.hetero.encoder_of_step:EncoderOfStep"
APART = "images-apart-sounds-separated"
OFFLOADS = (
    *("--full-hetero-dp-cpu-offload", "--offload-encoder-activations", "--offload-encoder-state"),
)

# Ranks in all, and flags. Each encoder has a mode and a size of its own, or ranks of its own; or
# all that can leave the device does, while one encoder is frozen and the other adapted.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "images-separated-sounds-in-groups": (
        4,
        (
            *(*TP2, *PP2, "--sequence-parallel", "model.image_encoder.mode=full_hetero_dp"),
            *("model.image_encoder.tensor_model_parallel_size=4",),
            *("model.audio_encoder.mode=encoder_hetero_dp",),
        ),
    ),
    "images-as-the-decoder-sounds-separated": (
        2,
        (
            *(*TP2, "model.image_encoder.mode=uniform", "--enable-full-hetero-dp"),
            "model.audio_encoder.tensor_model_parallel_size=1",
        ),
    ),
    "all-away-images-adapted-sounds-frozen": (
        2,
        (
            *(*VPP2, "--enable-full-hetero-dp", *OFFLOADS, "+model.image_encoder.lora.rank=2"),
            "model.audio_encoder.freeze=true",
        ),
    ),
    "sounds-apart": (2, lies(1, of="audio")),
    APART: (3, (*PP2, *lies(2), "model.audio_encoder.mode=full_hetero_dp")),
    "sounds-apart-images-in-groups": (
        3,
        (
            *(*TP2, "--sequence-parallel", *lies(2, of="audio")),
            "model.image_encoder.mode=encoder_hetero_dp",
        ),
    ),
    "both-apart": (3, (*lies(1, of="audio"), *lies(2))),
}
FEW = CASES.keys() - {"images-as-the-decoder-sounds-separated"}


def planned(name: str, folder: Path) -> Plan:
    ranks, flags = CASES[name]
    return made_plan(folder, *flags, model=OMNI, ranks=ranks)


@pytest.mark.parametrize("name", sweep(CASES, but=FEW))
def test_it_agrees_with_a_single_rank(name: str, tmp_path: Path) -> None:
    plan = planned(name, tmp_path)
    comparison = Pair(plan, tmp_path).agreeing()
    trained = {each.module for each in comparison.tensors if each.what == "gradients"}
    frozen = {"audio_encoder"} if "sounds-frozen" in name else set()
    assert trained >= (HEARS | SEES) - frozen
    assert not frozen & trained


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """TP 2 on two ranks, each with both encoders' whole weights."""
    folder = tmp_path_factory.mktemp("omni")
    one = (f"model.{name}_encoder.tensor_model_parallel_size=1" for name in ("image", "audio"))
    flags = (*TP2, "--enable-full-hetero-dp", *one)
    return Pair(made_plan(folder, *flags, model=OMNI, steps=1), folder)


def double_the_gradient_of_images(rank: int) -> None:
    """What comes back to that encoder has the right shape and another size."""

    def backward(original: Any, self: Any, payload: Any, gradient: Tensor, **more: Any) -> None:
        factor = 2.0 if self._entry.name == "image_encoder" else 1.0
        original(self, payload, gradient * factor, **more)

    around(f"{OF_STEP}.backward", backward)


def test_they_agree_without_a_fault(pair: Pair) -> None:
    comparison = pair.agreeing()
    assert {each.module for each in comparison.tensors} >= {*HEARS, *SEES}


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [(lose_the_gradient_of_sounds, HEARS), (double_the_gradient_of_images, SEES)],
)
def test_gradients_of_one_encoder_alone(pair: Pair, fault: Mutation, wrong: set[str]) -> None:
    assert failing(pair.compared(fault), "gradients") == wrong


def test_features_in_another_order(pair: Pair) -> None:
    assert failing(pair.compared(turn_the_rows_of_sounds), "gradients") >= {
        *("audio_encoder", "text_decoder layers")
    }


def losses_of(rank: int, *, flags: list[str]) -> list[float]:
    return [step.loss for step in run(flags, verified=True)]


@pytest.mark.slow
def test_a_run_goes_on_where_both_lie_with_the_decoder_and_back(tmp_path: Path) -> None:
    """With samples that may be left out: both encoders tell of theirs."""
    plan, kept = planned(APART, tmp_path), str(tmp_path / "run")
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
