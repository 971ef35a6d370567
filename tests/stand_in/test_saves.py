"""Checkpoints, packs, evaluation and exports on the stand-in: the CPU's files."""

from pathlib import Path

import pytest
import torch
from parity.cells import Cell
from parity.matrix import Matrix
from safetensors.torch import load_file

from stand_in.runs import train, trained, trained_on_the_cpu

CELL = Cell(model="qwen3_vl_tiny", mode="full-hetero-dp", pp=2, optimizer="distributed")


def weights(export: Path) -> dict[str, torch.Tensor]:
    files = sorted(export.glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(found: Path, expected: Path) -> None:
    one, other = weights(found), weights(expected)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.slow
def test_a_run_that_goes_on_from_the_other_devices_checkpoint(
    matrix: Matrix, tmp_path: Path
) -> None:
    """Packed, evaluated, saved and exported.

    Without --async-save: what writes then is a process of its own, which has no such device.
    """
    base = [*matrix.base(CELL), *CELL.flags(), "--packing"]
    data = base[base.index("--train-data-path") + 1]
    base += ["--valid-data-path", data, "--eval-interval", "1", "--eval-iters", "1"]
    for name, function in (("cpu", trained_on_the_cpu), ("device", trained)):
        saves = ["--save", str(tmp_path / name), "--save-hf", str(tmp_path / f"{name}-hf")]
        train(function, [*base, *saves], ranks=CELL.ranks)
    same(tmp_path / "device-hf", tmp_path / "cpu-hf")
    for name, other, function in (
        ("cpu", "device", trained_on_the_cpu),
        ("device", "cpu", trained),
    ):
        goes_on = ["--load", str(tmp_path / other), "--save-hf", str(tmp_path / f"{name}-on")]
        train(
            function,
            [*base, "--train-iters", "3", *goes_on, "--override-opt_param-scheduler"],
            ranks=CELL.ranks,
        )
    same(tmp_path / "device-on", tmp_path / "cpu-on")
