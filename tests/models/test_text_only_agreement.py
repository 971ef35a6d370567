"""A batch without any image or video: the encoder runs on nothing and gets no gradient."""

import pytest
from hf_batches import batch
from hf_models import Layout
from hf_reference import assert_agrees, reference
from tiny_families import FAMILIES

LAYOUTS = [Layout(), Layout(tp=2, pp=2, sequence_parallel=True, micro_batch_size=2)]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_text_alone_agrees_with_transformers(tmp_path, family):
    expected = reference(tmp_path, FAMILIES[family].model, batch(media=((),) * 4))
    assert not any("visual" in name for name in expected.step.gradients)
    for layout in LAYOUTS:
        assert_agrees(expected, layout)
