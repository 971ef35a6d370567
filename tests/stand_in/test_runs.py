"""Whole runs on the stand-in: the CPU's numbers bit by bit, whatever module is where.

A few; with WHOLE_SWEEP in the environment (``scripts/test.sh --all``), every
cell of the parity matrix that fits four ranks: layouts, savings, the MoE overlap.
"""

import os
from pathlib import Path

import pytest
import torch
from free_passes import free_passes
from parity.cells import Cell
from parity.matrix import Matrix
from parity.parts import cells_of
from parity.placed import placed

from loongplug.verify.forked_runs import record
from loongplug.verify.recorded_run import (
    FIRST_MOMENT,
    PARAMETERS,
    ROOM,
    SECOND_MOMENT,
    gradients_of,
    read_recording,
)
from stand_in.runs import OVERLAP, SECONDS, recorded, train, trained
from stand_in.waits import between_microbatches
from stand_in.waits_table import virtual

ALL_OFFLOADS = Cell(
    model="qwen3_vl_tiny",
    mode="full-hetero-dp",
    encoder_tp=2,
    pp=2,
    recompute="both",
    tied=True,
    away="all three",
)
# An encoder whose stages have ranks of their own.
STAGES = placed("1/1/1|1/2/1")
FEW = (OVERLAP, ALL_OFFLOADS, STAGES)
MOST_RANKS = 4


def agree(cell: Cell, matrix: Matrix, folder: Path) -> None:
    """Every number of the cell's run on the stand-in is the CPU's."""
    flags = [*matrix.base(cell), *cell.flags()]
    ranks = cell.ranks
    host = read_recording(
        record(flags, ranks=ranks, device="cpu", folder=folder / "cpu", timeout=SECONDS)
    )
    device = read_recording(recorded(flags, ranks=ranks, folder=folder / "device"))
    assert device.steps == host.steps
    assert device.start == host.start
    steps = [gradients_of(step) for step in range(len(host.steps))]
    for kind in (PARAMETERS, FIRST_MOMENT, SECOND_MOMENT, ROOM, *steps):
        found, expected = device.kind(kind), host.kind(kind)
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), (kind, name)


@pytest.mark.slow
@pytest.mark.parametrize("cell", FEW, ids=lambda cell: cell.name)
def test_a_run_has_the_cpus_bits(cell: Cell, matrix: Matrix, tmp_path: Path) -> None:
    agree(cell, matrix, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["qwen3_vl_tiny", pytest.param("qwen2_5_vl_tiny", marks=pytest.mark.sweep)]
)
def test_stages_wait_for_shapes_where_deepstack_features_travel_and_else_not(
    model: str, matrix: Matrix
) -> None:
    cell = virtual(model)
    flags = [*matrix.base(cell), *cell.flags(), "--train-iters", "1"]
    for rank in train(trained, flags, ranks=cell.ranks):
        known, shapes, others = between_microbatches(rank)
        assert not others
        assert 0 < known <= 14
        assert (shapes > 0) == (model == "qwen3_vl_tiny")


@pytest.mark.slow
def test_stages_of_a_step_that_streams_know_the_shapes(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    cell = virtual("qwen3_vl_tiny")
    flags = [*matrix.base(cell), *cell.flags(), "--train-iters", "1"]
    flags += ["--full-hetero-dp-schedule", "streamed"]
    for rank in train(trained, flags, ranks=cell.ranks, fault=free_passes):
        known, shapes, others = between_microbatches(rank)
        assert not others
        assert 0 < known <= 14
        assert not shapes


@pytest.mark.slow
@pytest.mark.skipif("WHOLE_SWEEP" not in os.environ, reason="takes hours; scripts/test.sh --all")
@pytest.mark.parametrize(
    "cell",
    [
        cell
        for part in ("layouts", "savings", "overlap", "placements")
        for cell in (cells_of(part) if "WHOLE_SWEEP" in os.environ else ())
        if cell.ranks <= MOST_RANKS
    ],
    ids=lambda each: each.name,
)
def test_every_run_has_the_cpus_bits(cell: Cell, matrix: Matrix, tmp_path: Path) -> None:
    agree(cell, matrix, tmp_path)
