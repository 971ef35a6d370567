"""Logits, loss and every gradient against transformers, in every layout.

The error is relative to the tensor: the largest absolute difference over the largest absolute
value of the reference. It stays below 1e-4 in fp32.
"""

import pytest
from qwen3_vl_reference import (
    Layout,
    architecture,
    batch,
    our_step,
    reference_model,
    reference_step,
    relative_error,
)
from ranks import run_ranks

LIMIT = 1e-4

LAYOUTS = [
    Layout(),
    Layout(micro_batch_size=4),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2, micro_batch_size=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, sequence_parallel=True, micro_batch_size=2),
    Layout(pp=2, vpp=2),
    Layout(pp=2, vpp=2, tp=2, sequence_parallel=True),
    Layout(pp=4),
    Layout(tp=2, pp=2, recompute=True, sequence_parallel=True),
    Layout(pp=2, dp=2, distributed_optimizer=False, overlap_grad_reduce=True),
]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def reference(request, tmp_path_factory):
    tied = request.param
    model = reference_model(tied=tied)
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return architecture(tied=tied), folder, reference_step(model, batch())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_agrees_with_transformers(reference, layout):
    model, folder, expected = reference
    step = run_ranks(
        our_step, layout.world_size, folder=folder, model=model, layout=layout, data=batch()
    )[0]
    assert abs(step.loss - expected.loss) < LIMIT * expected.loss
    real = batch().microbatch(0, 8)
    lengths = [sample.tokens for sample in batch().samples]
    for sample, length in enumerate(lengths):  # behind a sample's end, the two pad differently
        error = relative_error(step.logits[sample, :length], expected.logits[sample, :length])
        assert error < LIMIT, (sample, error)
    assert real.loss_mask.sum() > 0
    assert set(step.gradients) == set(expected.gradients)
    errors = {
        name: relative_error(step.gradients[name], gradient)
        for name, gradient in expected.gradients.items()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < LIMIT, (worst, errors[worst])
