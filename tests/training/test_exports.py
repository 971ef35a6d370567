"""A run whose export fails at its end says where the model is, and that leads to the export."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from digits.make import make_demo_data
from layout_flags import TP2
from ranks import RankError, run_ranks
from safetensors.torch import load_file

from loongplug.checkpoint import hf_export
from loongplug.convert.rank import convert
from loongplug.training.progress import StepReport
from loongplug.training.run import run


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    demo = tmp_path_factory.mktemp("demo")
    make_demo_data(demo, train=16, test=4)
    return [
        *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
        *("--tokenizer-model", str(demo / "processor"), "--seq-length", "48"),
        *("--train-data-path", str(demo / "train.jsonl"), "--train-iters", "2", "--lr", "1e-3"),
        *("--micro-batch-size", "2", "--global-batch-size", "4", "--bf16"),
        *("model.foundation.num_layers=2", "--use-distributed-optimizer"),
    ]


def full_disk(*args: object) -> None:
    raise OSError(28, "No space left on device")


def failing(rank: int, *, flags: list[str], metrics: Path | None) -> None:
    """A run during which the folder of the metrics goes, or the disk of the export becomes full."""

    def in_the_way(report: StepReport) -> None:
        if metrics is not None and rank == 0 and report.iteration == 2:
            metrics.parent.rmdir()
            metrics.parent.touch()

    with pytest.MonkeyPatch.context() as patch:
        if metrics is None:
            patch.setattr(hf_export, "new_tensor_file", full_disk)
        run(flags, on_report=in_the_way)


@pytest.fixture(scope="module")
def reference(flags, tmp_path_factory) -> Path:
    """The export of a run whose metrics could not be written, which costs it nothing else."""
    folder = tmp_path_factory.mktemp("reference")
    metrics = folder / "metrics" / "metrics.json"
    metrics.parent.mkdir()
    more = ("--save-hf", str(folder / "hf"), "--metrics-json", str(metrics))
    with pytest.raises(RankError, match=r"--metrics-json .*metrics.json cannot be written"):
        run_ranks(failing, 2, flags=[*flags, *TP2, *more], metrics=metrics, timeout=120.0)
    assert json.loads((folder / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(folder / "hf" / "model.safetensors").values()
    assert {each.dtype for each in tensors} == {torch.bfloat16}
    return folder / "hf"


def exported(rank: int, *, flags: list[str]) -> None:
    convert(flags)


@pytest.mark.parametrize("saved", [True, False], ids=["with-save", "without-save"])
def test_the_model_of_a_failed_export_is_in_a_checkpoint(flags, reference, tmp_path, saved):
    hf, save = tmp_path / "out" / "hf", ()
    if saved:
        save = ("--save", str(tmp_path / "checkpoints"), "--async-save")
    given = [*flags, *TP2, *save, "--save-hf", str(hf)]
    with pytest.raises(RankError) as raised:
        run_ranks(failing, 2, flags=given, metrics=None, timeout=120.0)
    text = raised.value.errors[0]
    assert "The export failed: " in text
    assert "No space left on device): make room" in text
    folder = tmp_path / "checkpoints" if saved else tmp_path / "out" / "hf.checkpoint"
    assert f"The model is in the checkpoint {folder}." in text
    assert not hf.exists()
    (command,) = (line for line in text.splitlines() if line.startswith("  loongplug convert"))
    run_ranks(exported, 1, flags=["--device", "cpu", *shlex.split(command)[2:]], timeout=120.0)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (hf / name).read_bytes() == (reference / name).read_bytes(), name
