"""Conversion of a model with experts, there by one expert layout and back by another."""

import pytest
from micro.random_folder import write_random_folder
from ranks import run_ranks

from loongplug.convert.rank import convert

MODEL = ("--model-name", "qwen3_vl_moe_tiny", "--device", "cpu")
EP2 = ("--expert-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def converted(rank: int, *, flags: list[str]) -> None:
    convert(flags)


@pytest.mark.parametrize(
    ("there", "back"),
    [(EP2, TP2), (TP2, (*TP2, *EP2, "--expert-tensor-parallel-size", "1")), ((), EP2)],
    ids=["ep2-tp2", "tp2-tp2ep2", "dp2-ep2"],
)
def test_experts_there_and_back_give_the_same_bytes(tmp_path, there, back):
    folder, checkpoint, result = (tmp_path / name for name in ("hf", "checkpoint", "result"))
    write_random_folder(folder, model_name="qwen3_vl_moe_tiny")
    flags = [*MODEL, *there, "--load-hf", str(folder), "--save", str(checkpoint)]
    run_ranks(converted, 2, flags=flags, timeout=120.0)
    flags = [*MODEL, *back, "--load", str(checkpoint), "--save-hf", str(result)]
    run_ranks(converted, 2, flags=flags, timeout=120.0)
    before, after = (path / "model.safetensors" for path in (folder, result))
    assert before.read_bytes() == after.read_bytes()
