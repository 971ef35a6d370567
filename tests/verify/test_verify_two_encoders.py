"""A model that sees and hears, its encoders on the decoder's ranks: each as it wants agrees with a
single rank; what goes wrong with one encoder is found, and it is that one's.
"""

from pathlib import Path
from typing import Any

import pytest
from parity.built_in import around
from parity.encoder_faults import lose_the_gradient_of_sounds, turn_the_rows_of_sounds
from sweeps import sweep
from torch import Tensor
from verify_cases import Mutation, Pair, failing

from loongplug.verify.plan import Request
from loongplug.verify.report import report
from loongplug.verify.runs import plan_runs

OF_STEP = "loongplug.hetero.encoder_of_step:EncoderOfStep"
HEARS, SEES = {"audio_encoder", "audio_projector"}, {"image_encoder", "image_projector"}
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
VPP2 = (*PP2, "--num-virtual-stages-per-pipeline-rank", "2")
OFFLOADS = (
    *("--full-hetero-dp-cpu-offload", "--offload-encoder-activations", "--offload-encoder-state"),
)

# Colocated: ranks, and flags. Each encoder has a mode and a tensor parallel size of its own, or
# all that can leave the device does, while one encoder is frozen and the other has adapters.
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
}
FEW = ("images-separated-sounds-in-groups", "all-away-images-adapted-sounds-frozen")


@pytest.mark.parametrize("name", sweep(CASES, but=FEW))
def test_it_agrees_with_a_single_rank(name: str, tmp_path: Path) -> None:
    ranks, flags = CASES[name]
    command = ("--device", "cpu", "--model-name", "qwen2_5_omni_tiny", *flags)
    plan = plan_runs(Request(flags=command, scale="tiny", steps=2, ranks=ranks), folder=tmp_path)
    comparison = Pair(plan, tmp_path).compared()
    assert comparison.agrees, report(plan, comparison)
    trained = {each.module for each in comparison.tensors if each.what == "gradients"}
    frozen = {"audio_encoder"} if "sounds-frozen" in name else set()
    assert trained >= (HEARS | SEES) - frozen
    assert not frozen & trained


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """TP 2 on two ranks, each with both encoders' whole weights."""
    folder = tmp_path_factory.mktemp("omni")
    flags = (
        *("--device", "cpu", "--model-name", "qwen2_5_omni_tiny", "--enable-full-hetero-dp"),
        *("--tensor-model-parallel-size", "2", "model.image_encoder.tensor_model_parallel_size=1"),
        "model.audio_encoder.tensor_model_parallel_size=1",
    )
    return Pair(plan_runs(Request(flags=flags, scale="tiny", steps=1), folder=folder), folder)


def double_the_gradient_of_images(rank: int) -> None:
    """What comes back to that encoder has the right shape and another size."""

    def backward(original: Any, self: Any, payload: Any, gradient: Tensor, **more: Any) -> None:
        factor = 2.0 if self._entry.name == "image_encoder" else 1.0
        original(self, payload, gradient * factor, **more)

    around(f"{OF_STEP}.backward", backward)


def test_they_agree_without_a_fault(pair: Pair) -> None:
    comparison = pair.compared()
    assert comparison.agrees, report(pair.plan, comparison)
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
