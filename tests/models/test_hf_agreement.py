"""Logits, loss and every gradient against transformers, in every layout.

The error is relative to the tensor: the largest absolute difference over the largest absolute
value of the reference. It stays below 1e-4 in fp32.
"""

import pytest
from hf_batches import TOKEN_IDS, batch
from hf_reference import Layout, assert_agreement, reference_model, reference_step
from tiny_qwen3_vl_moe import TEXT, VISION

from loongplug.models.qwen3_vl.config import (
    Qwen3DecoderConfig,
    Qwen3ProjectorConfig,
    Qwen3VLConfig,
)

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


def architecture(*, tied: bool) -> Qwen3VLConfig:
    """Small, but with every feature: GQA, deepstack over three layers, an uneven mRoPE."""
    return Qwen3VLConfig(
        image_encoder=VISION,
        image_projector=Qwen3ProjectorConfig(),
        foundation=Qwen3DecoderConfig(**TEXT, tie_word_embeddings=tied),
        **TOKEN_IDS,
    )


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
    return reference(tmp_path_factory.mktemp("hf"), tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return reference(tmp_path_factory.mktemp("hf"), tied=True)


def reference(folder, *, tied):
    model = reference_model(architecture(tied=tied))
    model.save_pretrained(folder)
    return architecture(tied=tied), folder, reference_step(model, batch())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_agrees_with_transformers(untied, layout):
    model, folder, expected = untied
    assert_agreement(model, folder, layout=layout, data=batch(), expected=expected)


@pytest.mark.parametrize("layout", TIED, ids=str)
def test_step_with_tied_embeddings_agrees_with_transformers(tied, layout):
    model, folder, expected = tied
    assert_agreement(model, folder, layout=layout, data=batch(), expected=expected)
