"""A sampled part of the parity matrix, and how the matrix keeps what it has run."""

import os
from dataclasses import replace

import pytest
from eventually import eventually
from image_units import ENCODER, media_batch
from ranks import run_ranks
from rich.console import Console

from loongplug.data.planned_media import Assignment
from loongplug.data.sample_order import SampleOrder
from loongplug.training.arguments import parse_arguments
from loongplug.training.datasets import DatasetProvider
from loongplug.training.provider import engine_of
from loongplug.training.rank_data import assignment_of
from loongplug.verify.ranks import RankError
from parity.bits import RankBits, first_difference
from parity.cells import EXPERTS, MODES, Cell
from parity.matrix import STEPS, Matrix, code_files, main, run_cells
from parity.option_flags import FULL
from parity.page import Result, page
from parity.parts import PARTS, cells_of, sample

SEED, CELLS, MOST = 6, 3, 4
CELL = Cell(model="qwen3_vl_tiny", tp=2)
QUIET = Console(quiet=True)


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
    results = run_cells(cells, folder=tmp_path, console=Console(stderr=True), jobs=2)
    assert [result.cell for result in results] == cells
    assert all(result.agrees for result in results), [
        (result.cell.name, result.failed, result.gradients) for result in results
    ]
    known = Matrix(tmp_path).known()
    assert {name: result.agrees for name, result in known.items()} == {
        cell.name: True for cell in cells
    }


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
    right, wrong = run_cells([cell, other], folder=tmp_path, console=Console(stderr=True), jobs=1)
    assert right.agrees, right
    assert right.gradients, "something was compared"
    assert not wrong.agrees
    assert wrong.failed is None
    assert wrong.bits == "losses of rank 0 differ", "those of the second step"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("what", "value"),
    [("losses", [1.1]), ("norms", [2.1]), ("gradients", [{"w": 5}]), ("parameters", {"w": 5})],
)
def test_any_other_bit_is_found(what, value):
    bits = RankBits(losses=[1.0], norms=[2.0], gradients=[{"w": 3}], parameters={"w": 4})
    assert first_difference([bits, replace(bits, **{what: value})], [bits, bits]) == (
        f"{what} of rank 1 differ"
    )


@pytest.mark.quick
class TestWithoutRuns:
    @pytest.fixture(autouse=True)
    def _without_references(self, monkeypatch):
        monkeypatch.setattr(Matrix, "prepare", lambda self, cell: None)

    def test_jobs_share_the_cells_and_none_is_run_again(self, tmp_path, monkeypatch):
        def run(self, cell, folder):
            (tmp_path / f"job-{os.getpid()}").touch()
            eventually(lambda: len(list(tmp_path.glob("job-*"))) >= 2)
            return figures(cell, loss=float(os.getpid()))

        monkeypatch.setattr(Matrix, "_run", run)
        cells = sample(cells_of("overlap"), 6, seed=0)
        results = run_cells(cells, folder=tmp_path, console=QUIET, jobs=2)
        assert [result.cell for result in results] == cells
        assert len({result.loss for result in results}) == 2
        assert os.getpid() not in {result.loss for result in results}
        kept = tmp_path / "results.jsonl"
        assert run_cells(cells, folder=tmp_path, console=QUIET) == results
        assert len(kept.read_text().splitlines()) == len(cells)
        monkeypatch.setattr("parity.matrix.code_digest", lambda: "other code")
        run_cells(cells[:1], folder=tmp_path, console=QUIET)
        assert len(kept.read_text().splitlines()) == len(cells) + 1

    def test_what_a_job_dies_of_is_told(self, tmp_path, monkeypatch):
        def run(self, cell, folder):
            raise KeyError("not foreseen")

        monkeypatch.setattr(Matrix, "_run", run)
        with pytest.raises(RankError, match="not foreseen"):
            run_cells([CELL], folder=tmp_path, console=QUIET, jobs=2)

    def test_what_is_stopped_half_way_is_not_there(self, tmp_path):
        def stop(folder):
            folder.mkdir()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Matrix(tmp_path)._once(tmp_path / "shared", stop)
        assert not list(tmp_path.iterdir())

    def test_the_command_writes_a_page_and_tells_of_what_differs(
        self, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr(
            Matrix, "_run", lambda self, cell, folder: figures(cell, agrees=cell.delayed)
        )
        monkeypatch.setattr("parity.matrix.preload", lambda device: None)
        assert main(["--part", "overlap", "--sample", "6", "--folder", str(tmp_path)]) == 1
        found = [*Matrix(tmp_path).known().values()]
        agree = sum(each.agrees for each in found)
        assert (len(found), 0 < agree < 6) == (6, True)
        file = tmp_path / "pages" / "overlap.md"
        text = file.read_text()
        assert f"6 of {len(cells_of('overlap'))} cells: {agree} agree, {6 - agree} do not" in text
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
    text = page("layouts", results, about=PARTS["layouts"].about, whole=9, code="abc")
    lines = text.splitlines()
    assert "5 of 9 cells: 2 agree, 3 do not. The code had the digest `abc`." in text
    for line in (
        "| mode | uniform | 3 | 1 | 2.0e-06 | 1.0e-07 | 3.0e-07 | 1.0e-08 |",
        f"| mode | {FULL} | 2 | 1 | 5.0e-06 | 1.0e-07 | 1.0e-07 | 1.0e-08 |",
        "| published | A8 tp4_llm_tp2dp2_vision | 2 | 1 | 5.0e-06 | 1.0e-07 | 1.0e-07 | 1.0e-08 |",
        "| all |  | 5 | 2 | 5.0e-06 | 1.0e-07 | 3.0e-07 | 1.0e-08 |",
        f"| {FULL} | 2 | 4 | 1 | 2 | none | 5.0e-06 | 1.0e-07 | 1.0e-07 | 1.0e-08 | agrees |",
    ):
        assert line in lines
    ends = [line.rsplit("| ", 1)[1] for line in lines[lines.index(f"## {CELL.model}") + 4 :]]
    assert sorted(ends) == sorted(
        ["agrees |"] * 2 + ["**differs** |", "**failed** |", "**norms of rank 0 differ** |"]
    )
    assert [result.outcome for result in results[1:4]] == [
        "differs (2.0e-06)",
        "failed: KeyError: 'a'",
        "agrees (5.0e-06)",
    ]


@pytest.mark.quick
def test_results_hang_on_the_product_and_on_the_cells():
    names = {file.name for file in code_files()}
    assert {"exchange.py", "run.py", "cells.py", "qwen3_vl_tiny.yaml"} <= names
