"""What counts as a difference: on recordings made by hand."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from loongplug.verify.compare import compare
from loongplug.verify.recorded_run import (
    FIRST_MOMENT,
    PARAMETERS,
    ROOM,
    SECOND_MOMENT,
    ApartNote,
    MicrobatchLoss,
    RecordedStep,
    Recording,
    TensorNote,
    gradients_of,
    read_recording,
    tensor_file,
)

pytestmark = pytest.mark.quick

RATE = 1e-3


def tensors():
    """Kind -> name -> tensor; the experts' second is a hundredth of the first in size."""
    generator = torch.Generator().manual_seed(0)
    weight, small = (torch.randn(8, 4, generator=generator) for _ in range(2))
    experts = torch.stack([weight, 0.01 * small])
    one = {"weight": weight, "experts": experts}
    return {
        gradients_of(0): one,
        FIRST_MOMENT: {name: 0.1 * each for name, each in one.items()},
        SECOND_MOMENT: {name: 0.001 * each**2 for name, each in one.items()},
        ROOM: {name: each.abs() + 1e-8 for name, each in one.items()},
        PARAMETERS: {name: torch.ones_like(each) for name, each in one.items()}
        | {"frozen": torch.ones(3)},
    }


STEP = RecordedStep(
    learning_rate=RATE,
    gradient_norms=(2.0, 2.0),
    microbatches=(MicrobatchLoss(0, 7, 30.0, 10.0), MicrobatchLoss(1, 8, 20.0, 10.0)),
    apart=(),
)


def recording(folder, *, kinds=None, step=STEP, start=5):
    folder.mkdir(exist_ok=True)
    for kind, named in (kinds or tensors()).items():
        save_file(named, folder / tensor_file(kind))
    made = Recording(
        folder=folder,
        ranks=2,
        steps=(step,),
        tensors={
            "weight": TensorNote("text_decoder layers", experts=False),
            "experts": TensorNote("text_decoder experts", experts=True),
            "frozen": TensorNote("image_encoder", experts=False),
        },
        start={"weight": start},
    )
    made.write()
    return read_recording(folder)


@pytest.fixture
def against(tmp_path):
    """A function that compares a changed recording with the unchanged one."""
    expected = recording(tmp_path / "expected")

    def compared(change=lambda kinds: None, **more):
        kinds = tensors()
        change(kinds)
        return compare(recording(tmp_path / "found", kinds=kinds, **more), expected)

    return compared


def failures(comparison):
    return {(each.what, each.name) for each in comparison.tensors if each.fails}


def test_the_same_agrees(against):
    comparison = against()
    assert comparison.agrees
    assert {each.name for each in comparison.tensors} == {
        *("weight", "experts[0]", "experts[1]", "frozen")
    }


@pytest.mark.parametrize(
    ("kind", "name", "place", "change", "fails"),
    [
        (gradients_of(0), "weight", (0, 0), lambda x: x + 1e-5, None),  # rounding
        (PARAMETERS, "weight", (0, 0), lambda x: x + 2e-7, None),
        (gradients_of(0), "experts", 0, lambda x: x * 1.001, ("gradients", "experts[0]")),
        (gradients_of(0), "experts", 1, lambda x: x * 1.001, ("gradients", "experts[1]")),
        (FIRST_MOMENT, "weight", ..., lambda x: x * 1.01, (FIRST_MOMENT, "weight")),
        (SECOND_MOMENT, "weight", ..., lambda x: x * 1.01, (SECOND_MOMENT, "weight")),
        (PARAMETERS, "frozen", 0, lambda x: x + 1e-3, ("parameters", "frozen")),  # may not move
        (gradients_of(0), "weight", (0, 0), lambda x: x * float("nan"), ("gradients", "weight")),
    ],
)
def test_what_differs_is_named(against, kind, name, place, change, fails):
    def changed(kinds):
        kinds[kind][name][place] = change(kinds[kind][name][place])

    comparison = against(changed)
    assert failures(comparison) == ({fails} if fails else set())
    assert comparison.agrees == (fails is None)
    if name == "experts":
        assert comparison.worst("gradients").ratio == pytest.approx(1.001)
        assert comparison.worst("gradients").module == "text_decoder experts"


def test_a_parameter_may_differ_where_its_gradient_is_nothing_but_rounding(against, tmp_path):
    kinds = tensors()
    kinds[ROOM]["weight"][0, 0] = 1e-7
    expected = recording(tmp_path / "noise", kinds=kinds)
    kinds[PARAMETERS]["weight"][0, 0] += 2 * RATE  # Adam's step in the other direction
    found = recording(tmp_path / "found", kinds=kinds)
    assert compare(found, expected).agrees
    kinds[PARAMETERS]["weight"][0, 1] += 0.01 * RATE  # of a gradient like the others
    found = recording(tmp_path / "found", kinds=kinds)
    assert failures(compare(found, expected)) == {("parameters", "weight")}


def test_a_tensor_that_is_missing_is_named(against):
    def change(kinds):
        del kinds[gradients_of(0)]["weight"]

    assert against(change).faults == ("gradients-0: the layout has none of weight",)


def test_one_ranks_norm_is_enough(against):
    assert not against(step=replace(STEP, gradient_norms=(2.0, float("nan")))).agrees
    comparison = against(step=replace(STEP, gradient_norms=(2.0, 2.0001)))
    assert [norm.fails for norm in comparison.norms] == [True]
    assert comparison.norms[0].found == 2.0001


def test_losses_are_compared_microbatch_by_microbatch(against):
    first, second = STEP.microbatches
    wrong = replace(STEP, microbatches=(first, replace(second, loss=20.001)))
    assert [loss.first_sample for loss in against(step=wrong).losses if loss.fails] == [1]
    swapped = replace(
        STEP,
        microbatches=(replace(second, first_sample=0), replace(first, first_sample=1)),
    )
    assert [loss.note for loss in against(step=swapped).losses] == ["other samples"] * 2
    missing = replace(STEP, microbatches=(first,))
    assert [loss.note for loss in against(step=missing).losses] == ["", "the layout has none"]


def test_copies_that_differ_and_other_weights_are_differences(against):
    note = ApartNote("weights", "a.norm", (0, 2), 0.5)
    comparison = against(step=replace(STEP, apart=(note,)))
    assert comparison.apart == (
        "weights of a.norm differ from the start between ranks 0, 2 (by 5.0e-01)",
    )
    assert not comparison.agrees
    assert against(start=6).faults == ("1 weights differ before the first step: weight",)
