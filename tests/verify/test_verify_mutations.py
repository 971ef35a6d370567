"""Every fault that is built into a layout is seen, and named in the right place."""

import pytest
from parity.gradient_faults import (
    count_replicas_twice,
    count_units_twice,
    double_encoder,
    miss_tied_reduction,
    norm_by_the_decoders_group,
    start_apart,
    sum_norms_over_tp,
)
from parity.mutations import drop_deepstack_gradient, swap_units
from verify_cases import SEES, TIED, Pair, failing, made_plan

from loongplug.verify.report import report

# Heterogeneous TP on the ranks of ``split``: two replicas of the encoder.
OWN_TP = ("model.image_encoder.tensor_model_parallel_size=1",)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """TP 2 on two ranks."""
    folder = tmp_path_factory.mktemp("split")
    return Pair(made_plan(folder, "--tensor-model-parallel-size", "2"), folder)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """PP 2 on two ranks, the embedding tied to the head."""
    folder = tmp_path_factory.mktemp("tied")
    return Pair(made_plan(folder, "--pipeline-model-parallel-size", "2", TIED), folder)


def first_failing(comparison):
    """What fails of the first step, before weights differ."""
    return [each for each in comparison.tensors if each.step == 0 and each.fails]


def test_the_layouts_agree_without_a_fault(split, tied):
    for pair, more in ((split, ()), (split, OWN_TP), (tied, ())):
        pair.agreeing(more=more)


def test_an_encoder_whose_replicas_count_twice(split):
    first = first_failing(split.compared(count_units_twice, more=OWN_TP))
    assert {each.module for each in first} == SEES
    assert all(each.ratio == pytest.approx(2.0, rel=1e-4) for each in first)


def test_an_encoder_whose_norm_is_of_other_ranks(split):
    comparison = split.compared(norm_by_the_decoders_group, more=OWN_TP)
    assert all(norm.fails for norm in comparison.norms)
    assert not first_failing(comparison)


def test_doubled_gradients(split):
    comparison = split.compared(double_encoder)
    assert failing(comparison, "gradients") >= {"image_encoder"}
    first = first_failing(comparison)
    assert {each.module for each in first} == {"image_encoder"}
    assert all(each.ratio == pytest.approx(2.0, rel=1e-4) for each in first)
    assert "image_encoder: model.visual" in (text := report(split.plan, comparison))
    assert "x2.000 in size" in text
    assert text.splitlines()[-1].startswith("verdict: differs")


def test_gradients_summed_over_the_tensor_parallel_group(split):
    comparison = split.compared(sum_norms_over_tp)
    first = first_failing(comparison)
    assert {each.module for each in first} == {"image_projector"}
    assert all(".norm." in each.name for each in first)
    assert comparison.worst("gradients").ratio == pytest.approx(2.0, rel=1e-2)


def test_swapped_units(split):
    comparison = split.compared(swap_units)
    first, second, *more = [each.first_sample for each in comparison.losses if each.fails][:2]
    assert second == first + 1
    assert not more
    assert not comparison.apart
    assert "image_encoder" in failing(comparison, "gradients")


def test_dropped_deepstack_gradient(split):
    comparison = split.compared(drop_deepstack_gradient)
    gone = [each for each in comparison.tensors if each.step == 0 and each.ratio == 0.0]
    assert gone
    assert all("deepstack_merger" in each.name and each.error == 1.0 for each in gone)
    assert not any(each.fails for each in comparison.losses if each.step == 0)


def test_a_norm_that_counts_replicas_twice(split):
    comparison = split.compared(count_replicas_twice)
    assert all(each.fails and each.found > each.expected for each in comparison.norms[:1])
    assert not first_failing(comparison)
    assert "gradient norm of step 1" in report(split.plan, comparison)


def test_replicas_that_start_different(split):
    comparison = split.compared(start_apart)
    weight = "weights of image_projector.merger.norm.weight"
    assert f"{weight} differ from the start between ranks 0, 1" in comparison.apart[0]
    assert not comparison.agrees


def test_a_missed_reduction_of_tied_embeddings(tied):
    comparison = tied.compared(miss_tied_reduction)
    name = "text_decoder.embedding.word_embeddings.weight"
    assert f"gradients of {name} differ in step 1" in comparison.apart[0]
    assert {each.module for each in first_failing(comparison)} == {"text_decoder embeddings"}
