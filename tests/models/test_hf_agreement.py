"""Logits, loss and every gradient against transformers, in every layout.

The error is relative to the tensor: the largest absolute difference over the largest absolute
value of the reference. It stays below 1e-4 in fp32.
"""

import pytest
from hf_batches import batch
from hf_models import Layout
from hf_reference import assert_agrees, reference
from tiny_families import QWEN3_VL, tied

LAYOUTS = [
    pytest.param(Layout(), marks=pytest.mark.quick),
    Layout(micro_batch_size=4),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2, micro_batch_size=2),
    Layout(tp=2, pp=2, sequence_parallel=True, micro_batch_size=2),
    Layout(pp=2, vpp=2),
    Layout(pp=4),
    Layout(tp=2, pp=2, recompute=True, sequence_parallel=True),
    Layout(pp=2, dp=2, distributed_optimizer=False, overlap_grad_reduce=True),
]


# What tied embeddings add is the reduction between the first and the last stage, and one weight in
# two places; every feature of a layout meets both.
TIED = [
    Layout(),
    Layout(tp=2, pp=2),
    Layout(pp=2, vpp=2, tp=2, sequence_parallel=True),
    Layout(tp=2, pp=2, recompute=True, sequence_parallel=True),
    Layout(pp=2, dp=2, distributed_optimizer=False, overlap_grad_reduce=True),
]


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return reference(tmp_path_factory.mktemp("hf"), QWEN3_VL, batch())


@pytest.fixture(scope="module")
def with_tied(tmp_path_factory):
    return reference(tmp_path_factory.mktemp("hf"), tied(QWEN3_VL), batch())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_agrees_with_transformers(untied, layout):
    assert_agrees(untied, layout)


@pytest.mark.parametrize("layout", TIED, ids=str)
def test_step_with_tied_embeddings_agrees_with_transformers(with_tied, layout):
    assert_agrees(with_tied, layout)
