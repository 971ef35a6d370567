"""Conversion of a model with experts, there by one expert layout and back by another."""

import pytest
from conversions import convert_on
from micro.random_folder import write_random_folder

MODEL = ("--model-name", "qwen3_vl_moe_tiny", "--device", "cpu")
EP2 = ("--expert-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@pytest.mark.parametrize(
    ("there", "back"),
    [(EP2, TP2), (TP2, (*TP2, *EP2, "--expert-tensor-parallel-size", "1"))],
    ids=["ep2-tp2", "tp2-tp2ep2"],
)
def test_experts_there_and_back_give_the_same_bytes(tmp_path, there, back):
    folder, checkpoint, result = (tmp_path / name for name in ("hf", "checkpoint", "result"))
    write_random_folder(folder, model_name="qwen3_vl_moe_tiny")
    convert_on(2, *MODEL, *there, "--load-hf", str(folder), "--save", str(checkpoint))
    convert_on(2, *MODEL, *back, "--load", str(checkpoint), "--save-hf", str(result))
    before, after = (path / "model.safetensors" for path in (folder, result))
    assert before.read_bytes() == after.read_bytes()
