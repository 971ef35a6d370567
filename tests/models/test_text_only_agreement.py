"""A batch without any image or video: the encoder runs on nothing and gets no gradient."""

import pytest
import test_hf_agreement
import tiny_qwen2_5_vl
import tiny_qwen3_vl_moe
from hf_batches import batch
from hf_reference import (
    Layout,
    assert_agreement,
    by_file_names,
    reference_model,
    reference_step,
)

ARCHITECTURES = {
    "qwen3_vl": lambda: test_hf_agreement.architecture(tied=False),
    "qwen2_5_vl": lambda: tiny_qwen2_5_vl.tiny_config(tied=False),
    "qwen3_vl_moe": tiny_qwen3_vl_moe.architecture,
}
LAYOUTS = [Layout(), Layout(tp=2, pp=2, sequence_parallel=True, micro_batch_size=2)]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_text_alone_agrees_with_transformers(tmp_path, family):
    model, data = ARCHITECTURES[family](), batch(media=((),) * 4)
    reference = reference_model(model)
    reference.save_pretrained(tmp_path)
    expected = reference_step(reference, data)
    if family == "qwen2_5_vl":
        expected = by_file_names(expected)
    assert not any("visual" in name for name in expected.gradients)
    for layout in LAYOUTS:
        assert_agreement(model, tmp_path, layout=layout, data=data, expected=expected)
