"""A sampled part of the parity matrix, and how the matrix keeps what it has run."""

import os
from dataclasses import replace

import pytest
from eventually import eventually
from image_units import ENCODER, media_batch
from ranks import run_ranks

from loongplug.data.planned_media import Assignment
from loongplug.data.sample_order import SampleOrder
from loongplug.training.arguments import parse_arguments
from loongplug.training.datasets import DatasetProvider
from loongplug.training.provider import engine_of
from loongplug.training.rank_data import assignment_of
from parity.cells import EXPERTS, MODES, Cell
from parity.matrix import STEPS, Matrix, main, run_cells
from parity.option_flags import FULL
from parity.page import Result, page
from parity.parts import cells_of, sample

SEED, CELLS, MOST = 6, 3, 4
CELL = Cell(model="qwen3_vl_tiny", tp=2)


def figures(cell, **more):
    values = {"agrees": True, "gradients": 2e-6, "gradient_norm": 1e-7, "loss": 1e-7}
    return Result(cell=cell, **{**values, "parameters": 1e-8, **more})


@pytest.mark.slow
def test_sampled_cells_agree(tmp_path):
    """A cell of each model and mode, of those that few ranks are enough for; a frozen decoder."""
    small = [cell for cell in cells_of("layouts") if 1 < cell.ranks <= MOST]
    cells = sample(small, CELLS, seed=SEED)
    assert len({cell.model for cell in cells}) == CELLS
    assert {cell.mode for cell in cells} == set(MODES)
    assert {cell.balance for cell in cells} == {False, True}
    saving = (cell for cell in cells_of("savings") if cell.ranks == 2)
    cells.append(next(cell for cell in saving if cell.trained == "all but the decoder"))
    results = run_cells(cells, folder=tmp_path, jobs=2)
    assert [result.cell for result in results] == cells
    assert all(result.agrees for result in results), [
        (result.cell.name, result.failed, result.gradients) for result in results
    ]


def owners(rank, *, cell, flags):
    """The owners of the units of each step, as its data give them."""
    os.environ["WORLD_SIZE"] = str(cell.ranks)
    parsed = parse_arguments(flags)
    args, encoder = parsed.args, parsed.model.encoder(ENCODER)
    data = DatasetProvider(args, parsed.model, engine=engine_of(args, parsed.model)).train
    order, step = SampleOrder(len(data), seed=args.seed), cell.microbatches
    assignment = assignment_of(args, encoder, replicas=cell.encoder_replicas)
    planned = []
    for first in range(0, STEPS * step, step):
        rows = [[each] for each in order.indices(range(first, first + step))]
        grids = [media_batch(each, data.text_parts(each)).grids for each in rows]
        planned.append([*assignment.of_step(grids)])
    return planned


def test_owners_of_a_balanced_cell_are_not_in_turn(tmp_path):
    """In a step at least, by the matrix's data."""
    cell = next(
        cell
        for cell in cells_of("layouts")
        if cell.balance and (cell.model, cell.dp, cell.encoder_replicas) == (CELL.model, 1, 2)
    )
    flags = [*Matrix(tmp_path).base(cell), *cell.flags()]
    (planned,) = run_ranks(owners, 1, cell=cell, flags=flags)
    in_turn = Assignment(replicas=2).of_step([()] * cell.microbatches)
    assert len(planned) == STEPS
    assert any(each != in_turn for each in planned)


@pytest.mark.slow
def test_an_overlapped_cell_agrees_and_a_run_that_is_other_by_a_bit_does_not(tmp_path, monkeypatch):
    def with_another_rate(self):
        """Cells of a distributed optimizer learn by a bit more where they overlap."""
        other = self.overlap and self.optimizer == "distributed"
        return [*flags(self), *(["--lr", "1.0001e-4"] if other else [])]

    flags = Cell.flags
    monkeypatch.setattr(Cell, "flags", with_another_rate)
    cell = Cell(model=EXPERTS, dp=2, ep=2, overlap=True, kept="both", shared_experts=True)
    other = replace(cell, optimizer="distributed")
    right, wrong = run_cells([cell, other], folder=tmp_path, jobs=1)
    assert right.agrees, right
    assert right.gradients, "something was compared"
    assert not wrong.agrees
    assert wrong.failed is None
    assert wrong.bits == "losses of rank 0 differ", "those of the second step"


@pytest.mark.quick
def test_jobs_share_the_cells_and_the_page_tells_of_what_differs(tmp_path, monkeypatch, capsys):
    def run(self, cell, folder):
        (tmp_path / f"job-{os.getpid()}").touch()
        eventually(lambda: len(list(tmp_path.glob("job-*"))) >= 2)
        return figures(cell, agrees=cell.delayed, loss=float(os.getpid()))

    monkeypatch.setattr(Matrix, "prepare", lambda self, cell: None)
    monkeypatch.setattr(Matrix, "_run", run)
    monkeypatch.setattr("parity.matrix.preload", lambda device: None)
    command = ["--part", "overlap", "--sample", "6", "--jobs", "2", "--folder", str(tmp_path)]
    assert main(command) == main(command) == 1
    found = [*Matrix(tmp_path).known().values()]
    assert len({os.getpid(), *(result.loss for result in found)}) == 3
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 6  # none again
    agree = sum(each.agrees for each in found)
    assert 0 < agree < 6
    file = tmp_path / "pages" / "overlap.md"
    said = f"6 of {len(cells_of('overlap'))} cells: {agree} agree, {6 - agree} do not"
    assert said in file.read_text()
    assert f"6 cells, {6 - agree} do not agree; {file}" in capsys.readouterr().out


@pytest.mark.quick
def test_the_page_shows_every_outcome():
    colocated = Cell(model=CELL.model, mode=FULL, encoder_tp=2, tp=4, dp=2)
    results = [
        figures(CELL, loss=3e-7),
        figures(Cell(model=CELL.model, dp=2), agrees=False),
        Result(cell=Cell(model=CELL.model, pp=4), failed="Traceback\nKeyError: 'a'"),
        figures(colocated, gradients=5e-6),
        figures(replace(colocated, recompute="both"), agrees=False, bits="norms of rank 0 differ"),
    ]
    lines = page("layouts", results, about="", whole=9, code="abc").splitlines()
    for line in (
        "| mode | uniform | 3 | 1 | 2.0e-06 | 1.0e-07 | 3.0e-07 | 1.0e-08 |",
        "| published | A8 tp4_llm_tp2dp2_vision | 2 | 1 | 5.0e-06 | 1.0e-07 | 1.0e-07 | 1.0e-08 |",
        f"| {FULL} | 2 | 4 | 1 | 2 | none | 5.0e-06 | 1.0e-07 | 1.0e-07 | 1.0e-08 | agrees |",
    ):
        assert line in lines
    ends = [line.rsplit("| ", 1)[1] for line in lines[lines.index(f"## {CELL.model}") + 4 :]]
    assert sorted(ends) == sorted(
        ["agrees |"] * 2 + ["**differs** |", "**failed** |", "**norms of rank 0 differ** |"]
    )
