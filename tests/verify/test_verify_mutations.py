"""Every fault that is built into a layout is seen, and named in the right place."""

import functools
import importlib

import pytest
import torch.distributed as dist
from verify_cases import TIED, Pair, failing, made_plan

from loongplug.verify.report import report

# Heterogeneous TP on the ranks of ``split``: two replicas of the encoder.
OWN_TP = ("model.image_encoder.tensor_model_parallel_size=1",)


@pytest.fixture(scope="module")
def split(demo, tmp_path_factory):
    """TP 2 on two ranks."""
    folder = tmp_path_factory.mktemp("split")
    return Pair(made_plan(folder, demo, "--tensor-model-parallel-size", "2"), folder)


@pytest.fixture(scope="module")
def tied(demo, tmp_path_factory):
    """PP 2 on two ranks, the embedding tied to the head."""
    folder = tmp_path_factory.mktemp("tied")
    return Pair(made_plan(folder, demo, "--pipeline-model-parallel-size", "2", TIED), folder)


def after_finalize(change):
    """Have ``change(name, parameter)`` called for each gradient when all reductions are done."""
    from megatron.training import training

    original = training.finalize_model_grads

    def finalize(model, *args, **kwargs):
        original(model, *args, **kwargs)
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                change(name, parameter)

    training.finalize_model_grads = finalize


def double_encoder(rank):
    def change(name, parameter):
        if "image_encoder" in name:
            parameter.main_grad.mul_(2)

    after_finalize(change)


def sum_norms_over_tp(rank):
    """What an all-reduce too many does: the gradients of replicated parameters times TP."""

    from megatron.core import parallel_state

    def change(name, parameter):
        if "image_projector" in name and ".norm." in name:
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(parameter.main_grad, group=group)

    after_finalize(change)


def swap_units(rank):
    """The pixels of the first two microbatches whose images have the same sizes change places."""
    from dataclasses import replace

    from loongplug.data.loader import MicrobatchLoader

    original = MicrobatchLoader.__next__
    ahead = []
    swapped = []

    def next_microbatch(self):
        if ahead:
            return ahead.pop()
        first, second = original(self), original(self)
        if (
            not swapped
            and len(first.vision.pixels)
            and (first.vision.grid_thw.tolist() == second.vision.grid_thw.tolist())
        ):
            swapped.append(True)
            first, second = (
                replace(first, vision=second.vision),
                replace(second, vision=first.vision),
            )
        ahead.append(second)
        return first

    MicrobatchLoader.__next__ = next_microbatch


def drop_deepstack_gradient(rank):
    from loongplug.models import decoder

    original = decoder.stack_features
    decoder.stack_features = lambda states, features: original(
        states, [feature.detach() for feature in features]
    )


def count_replicas_twice(rank):
    from megatron.core import tensor_parallel

    tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *args, **kwargs: True


def start_apart(rank):
    from loongplug.training import provider

    original = provider.load_hf_weights

    def load(chunks, folder, **kwargs):
        original(chunks, folder, **kwargs)
        if rank == 1:
            norm = dict(chunks[0].named_parameters())["image_projector.merger.norm.weight"]
            norm.data[0] *= 1.0 + 2**-20

    provider.load_hf_weights = load


def miss_tied_reduction(rank):
    # The package has a function of the module's name.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_word_embedding_grads = lambda *args, **kwargs: None


def count_units_twice(rank):
    """The sum over an encoder's replicas, each of which has encoded every unit, as it is."""
    from loongplug.hetero import engine

    state = engine.ModuleState
    engine.ModuleState = lambda **given: state(**given | {"gradient_factor": 1.0})


def norm_by_the_decoders_group(rank):
    """Which of the encoder's parameters count in the norm, asked of the decoder's ranks."""
    from megatron.training import training

    original = training.setup_model_and_optimizer

    @functools.wraps(original)
    def setup(*args, **kwargs):
        model, optimizer, scheduler = original(*args, **kwargs)
        (decoder,) = optimizer.of_part["text_decoder"]
        for encoder in optimizer.of_part["image_encoder"]:
            encoder.tp_group = decoder.tp_group
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = setup


def test_the_layouts_agree_without_a_fault(split, tied):
    for pair, more in ((split, ()), (split, OWN_TP), (tied, ())):
        comparison = pair.compared(more=more)
        assert comparison.agrees, report(pair.plan, comparison)


def test_an_encoder_whose_replicas_count_twice(split):
    comparison = split.compared(count_units_twice, more=OWN_TP)
    first = [each for each in comparison.tensors if each.step == 0 and each.fails]
    assert {each.module for each in first} == {"image_encoder", "image_projector"}
    assert all(each.ratio == pytest.approx(2.0, rel=1e-4) for each in first)


def test_an_encoder_whose_norm_is_of_other_ranks(split):
    comparison = split.compared(norm_by_the_decoders_group, more=OWN_TP)
    assert all(norm.fails for norm in comparison.norms)
    assert not [each for each in comparison.tensors if each.step == 0 and each.fails]


def test_doubled_gradients(split):
    comparison = split.compared(double_encoder)
    assert failing(comparison, "gradients") >= {"image_encoder"}
    first = [each for each in comparison.tensors if each.step == 0 and each.fails]
    assert {each.module for each in first} == {"image_encoder"}
    assert all(each.ratio == pytest.approx(2.0, rel=1e-4) for each in first)
    assert "image_encoder: model.visual" in (text := report(split.plan, comparison))
    assert "x2.000 in size" in text
    assert text.splitlines()[-1].startswith("verdict: differs")


def test_gradients_summed_over_the_tensor_parallel_group(split):
    comparison = split.compared(sum_norms_over_tp)
    first = [each for each in comparison.tensors if each.step == 0 and each.fails]
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
    assert not any(each.fails for each in comparison.tensors if each.step == 0)
    assert "gradient norm of step 1" in report(split.plan, comparison)


def test_replicas_that_start_different(split):
    comparison = split.compared(start_apart)
    assert (
        "weights of image_projector.merger.norm.weight differ from the start"
        in (comparison.apart[0])
    )
    assert "between ranks 0, 1" in comparison.apart[0]
    assert not comparison.agrees


def test_a_missed_reduction_of_tied_embeddings(tied):
    comparison = tied.compared(miss_tied_reduction)
    assert (
        "gradients of text_decoder.embedding.word_embeddings.weight differ in step 1"
        in (comparison.apart[0])
    )
    first = [each for each in comparison.tensors if each.step == 0 and each.fails]
    assert {each.module for each in first} == {"text_decoder embeddings"}
