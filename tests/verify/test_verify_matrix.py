"""A sampled part of the parity matrix, and how the matrix keeps what it has run."""

import json
from dataclasses import asdict

import pytest
from rich.console import Console

from loongplug.verify.cells import Cell, all_cells, sample
from loongplug.verify.matrix import Matrix, main, run_cells
from loongplug.verify.parity_page import page
from loongplug.verify.results import Result, outcome

SEED, CELLS, MOST = 2, 3, 4


def figures(cell, **more):
    values = {"agrees": True, "gradients": 2e-6, "gradient_norm": 1e-7, "loss": 1e-7}
    return Result(cell=cell, **{**values, "parameters": 1e-8, **more})


CELL = Cell(model="qwen3_vl_tiny", encoder_tp=1, tp=2)


@pytest.mark.slow
def test_sampled_cells_agree(tmp_path, demo):
    """One cell of each model, of those that few ranks are enough for."""
    small = [cell for cell in all_cells() if 1 < cell.ranks <= MOST]
    cells = sample(small, CELLS, seed=SEED)
    assert len({cell.model for cell in cells}) == CELLS
    assert {cell.heterogeneous for cell in cells} == {False, True}
    results = run_cells(cells, folder=tmp_path, console=Console(stderr=True))
    assert all(result.agrees for result in results), [
        (result.cell.name, result.failed, result.gradients) for result in results
    ]
    known = Matrix(tmp_path).known()
    assert {name: result.agrees for name, result in known.items()} == {
        cell.name: True for cell in cells
    }


@pytest.mark.quick
class TestWithoutRuns:
    def test_what_was_run_is_not_run_again(self, tmp_path, monkeypatch):
        runs = []

        def run(self, cell):
            runs.append(cell)
            return figures(cell)

        monkeypatch.setattr(Matrix, "_run", run)
        console = Console(quiet=True)
        run_cells([CELL], folder=tmp_path, console=console)
        (result,) = run_cells([CELL], folder=tmp_path, console=console)
        assert runs == [CELL]
        assert result.agrees
        monkeypatch.setattr("loongplug.verify.matrix.code_digest", lambda: "other code")
        run_cells([CELL], folder=tmp_path, console=console)
        assert runs == [CELL, CELL]

    def test_the_command_writes_page_and_json_and_tells_of_what_differs(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(Matrix, "_run", lambda self, cell: figures(cell, agrees=cell.tp == 1))
        flags = ["--folder", str(tmp_path / "runs"), "--page", str(tmp_path / "parity.md")]
        code = main([*flags, "--sample", "12", "--json", str(tmp_path / "results.json")])
        written = json.loads((tmp_path / "results.json").read_text())
        assert len(written) == 12
        assert code == 1
        assert not all(each["agrees"] for each in written)
        assert "12 of" in (tmp_path / "parity.md").read_text()

    def test_the_page_shows_every_outcome(self):
        results = [
            figures(CELL),
            figures(Cell(model="qwen3_vl_tiny", dp=2), agrees=False),
            Result(cell=Cell(model="qwen3_vl_tiny", pp=4), failed="Traceback\nKeyError: 'a'"),
        ]
        text = page(results, whole=9, code="abc")
        assert "3 of 9 cells: 1 agree, 2 do not. The code had the digest `abc`." in text
        assert text.count("| agrees |") == 1
        for verdict in ("**differs**", "**failed**"):
            assert text.count(f"| {verdict} |") == 1
        assert [outcome(result) for result in results] == [
            "agrees (2.0e-06)",
            "differs (2.0e-06)",
            "failed: KeyError: 'a'",
        ]

    def test_a_result_survives_the_file(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Matrix, "_run", lambda self, cell: figures(cell, failed="why"))
        ran = Matrix(tmp_path).run(CELL)
        assert asdict(Matrix(tmp_path).known()[CELL.name]) == asdict(ran)
