"""Qwen2.5-VL's logits, loss and every gradient against transformers, in every layout.

Errors are measured as for Qwen3-VL. The images have several windows with ragged edges, and the
encoder has layers of both kinds.
"""

import pytest
from hf_reference import (
    LAYOUTS,
    Layout,
    assert_agreement,
    by_file_names,
    reference_model,
    reference_step,
)
from tiny_qwen2_5_vl import tiny_batch, tiny_config

TIED = [  # see test_hf_agreement.py
    Layout(tp=2, pp=2),
    Layout(pp=2, vpp=2, tp=2, sequence_parallel=True),
    Layout(tp=2, pp=2, recompute=True, sequence_parallel=True),
    Layout(pp=2, dp=2, overlap_grad_reduce=True),
]


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return reference(tmp_path_factory.mktemp("hf"), tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return reference(tmp_path_factory.mktemp("hf"), tied=True)


def reference(folder, *, tied):
    model = tiny_config(tied=tied)
    theirs = reference_model(model)
    theirs.save_pretrained(folder)
    return model, folder, by_file_names(reference_step(theirs, tiny_batch()))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_qwen2_5_step_agrees_with_transformers(untied, layout):
    model, folder, expected = untied
    assert_agreement(model, folder, layout=layout, data=tiny_batch(), expected=expected)


@pytest.mark.parametrize("layout", TIED, ids=str)
def test_qwen2_5_step_with_tied_embeddings_agrees_with_transformers(tied, layout):
    model, folder, expected = tied
    assert_agreement(model, folder, layout=layout, data=tiny_batch(), expected=expected)
