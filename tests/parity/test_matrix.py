"""A sampled part of the parity matrix, and how the matrix keeps what it has run."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from eventually import eventually
from rich.console import Console

from loongplug.verify.ranks import RankError
from parity.cells import ENCODER_DP, FULL, MODELS, MODES, Cell, layout_cells, sample
from parity.matrix import PARTS, Matrix, code_files, main, run_cells
from parity.parity_page import layouts_page, savings_page
from parity.results import Result, outcome
from parity.saving_cells import TRAINED, SavingCell, saving_cells

SEED, CELLS, MOST = 6, 3, 4
SCRIPT_SEED = 10


def figures(cell, **more):
    values = {"agrees": True, "gradients": 2e-6, "gradient_norm": 1e-7, "loss": 1e-7}
    return Result(cell=cell, **{**values, "parameters": 1e-8, **more})


CELL = Cell(model="qwen3_vl_tiny", encoder_tp=1, tp=2)


@pytest.mark.slow
def test_sampled_cells_agree(tmp_path):
    """A cell of each model and mode, of those that few ranks are enough for."""
    small = [cell for cell in layout_cells() if 1 < cell.ranks <= MOST]
    cells = sample(small, CELLS, seed=SEED)
    assert len({cell.model for cell in cells}) == CELLS
    assert {cell.mode for cell in cells} == set(MODES)
    assert {cell.balance for cell in cells} == {False, True}
    results = run_cells(cells, folder=tmp_path, console=Console(stderr=True), jobs=2)
    assert [result.cell for result in results] == cells
    assert all(result.agrees for result in results), [
        (result.cell.name, result.failed, result.gradients) for result in results
    ]
    known = Matrix(tmp_path).known()
    assert {name: result.agrees for name, result in known.items()} == {
        cell.name: True for cell in cells
    }


@pytest.mark.slow
def test_sampled_savings_agree(tmp_path):
    """One cell with adapters, one with something frozen, one with all three away."""
    few = [cell for cell in saving_cells() if cell.ranks == 2]
    cells = [
        next(cell for cell in few if cell.trained == "LoRA of all modules"),
        next(cell for cell in few if cell.trained == "all but the decoder"),
        next(cell for cell in few if cell.away == "all three"),
    ]
    results = run_cells(cells, folder=tmp_path, console=Console(stderr=True), jobs=2)
    assert all(result.agrees for result in results), results
    assert all(result.gradients for result in results), "something was compared"


@pytest.mark.slow
def test_the_script_runs_a_cell_and_writes_the_page(tmp_path):
    """In a checkout of its own, whose environment is the one that runs the tests."""
    root = Path(__file__).resolve().parents[2]
    shutil.copytree(root / "scripts", tmp_path / "scripts")
    shutil.copy(root / "pyproject.toml", tmp_path)
    for folder in ("loongplug", "configs", "tests"):
        (tmp_path / folder).symlink_to(root / folder)
    (tmp_path / "docs").mkdir()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    wanted = hashlib.sha256((tmp_path / "pyproject.toml").read_bytes()).hexdigest()
    (programs.parent / ".loongplug-demo").write_text(f"{wanted}  -\n")
    (cell,) = sample(layout_cells(), 1, seed=SCRIPT_SEED)
    assert cell.ranks <= 4
    ran = subprocess.run(
        [
            tmp_path / "scripts" / "parity_matrix.sh",
            *("--part", "layouts", "--sample", "1", "--seed", str(SCRIPT_SEED)),
        ],
        cwd=tmp_path / "scripts",  # the script goes to its checkout
        timeout=150,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 cells, 0 do not agree; docs/parity.md" in ran.stdout
    assert (
        f"1 of {len(layout_cells())} cells: 1 agree"
        in (tmp_path / "docs" / "parity.md").read_text()
    )
    (line,) = (tmp_path / "runs" / "parity" / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["cell"] == asdict(cell)
    assert json.loads(line)["seconds"] > 0


@pytest.fixture
def without_references(monkeypatch):
    monkeypatch.setattr(Matrix, "prepare", lambda self, cell: None)


@pytest.mark.quick
@pytest.mark.usefixtures("without_references")
class TestWithoutRuns:
    def test_what_was_run_is_not_run_again(self, tmp_path, monkeypatch):
        log = tmp_path / "runs"  # cells run in other processes

        def run(self, cell, folder):
            with log.open("a") as file:
                file.write(f"{cell.name}\n")
            return figures(cell)

        monkeypatch.setattr(Matrix, "_run", run)
        console = Console(quiet=True)
        run_cells([CELL], folder=tmp_path, console=console)
        (result,) = run_cells([CELL], folder=tmp_path, console=console)
        assert log.read_text().split() == [CELL.name]
        assert result.agrees
        monkeypatch.setattr("parity.matrix.code_digest", lambda: "other code")
        run_cells([CELL], folder=tmp_path, console=console)
        assert log.read_text().split() == [CELL.name] * 2

    def test_what_is_in_its_folders_stays(self, tmp_path, monkeypatch):
        """A run has a folder of its own, and what cells share is made beside its place."""
        matrix = Matrix(tmp_path)
        mine = [f"{name}/0/mine" for name in ("layouts", "bits", "jobs", "child")]
        for name in mine:
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).touch()
        monkeypatch.setattr(Matrix, "_run", lambda self, cell, folder: figures(cell))
        matrix.run(CELL)

        def fill(folder):
            folder.mkdir()
            (folder / "whole").touch()

        def stop(folder):
            fill(folder)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            matrix._once(tmp_path / "shared" / "one", stop)
        assert not (tmp_path / "shared" / "one").exists()
        for make in (fill, stop):
            matrix._once(tmp_path / "shared" / "one", make)
        found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
        assert found == sorted([*mine, "results.jsonl", "shared/one/whole"])

    @pytest.mark.not_quick
    def test_jobs_share_the_cells(self, tmp_path, monkeypatch):
        def run(self, cell, folder):
            (tmp_path / f"job-{os.getpid()}").touch()
            eventually(lambda: len(list(tmp_path.glob("job-*"))) >= 3)
            return figures(cell, loss=float(os.getpid()))

        monkeypatch.setattr(Matrix, "_run", run)
        cells = sample(layout_cells(), 12, seed=0)
        results = run_cells(cells, folder=tmp_path, console=Console(quiet=True), jobs=3)
        assert [result.cell for result in results] == cells
        assert len({result.loss for result in results}) == 3
        assert os.getpid() not in {result.loss for result in results}
        lines = (tmp_path / "results.jsonl").read_text().splitlines()
        assert len(lines) == len(cells)

    def test_any_message_of_a_cell_that_failed_is_printed(self, tmp_path, monkeypatch):
        said = "RuntimeError: [/gloo/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:9104"
        monkeypatch.setattr(
            Matrix, "_run", lambda self, cell, folder: Result(cell=cell, failed=said)
        )
        console = Console(file=io.StringIO())
        run_cells([CELL], folder=tmp_path, console=console)
        assert f"{CELL.name}: failed: {said}\n" in console.file.getvalue()

    def test_what_a_job_dies_of_is_told(self, tmp_path, monkeypatch):
        def run(self, cell, folder):
            raise KeyError("not foreseen")

        monkeypatch.setattr(Matrix, "_run", run)
        with pytest.raises(RankError, match="not foreseen"):
            run_cells([CELL], folder=tmp_path, console=Console(quiet=True), jobs=2)

    @pytest.mark.not_quick
    def test_the_command_writes_pages_and_json_and_tells_of_what_differs(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(
            Matrix, "_run", lambda self, cell, folder: figures(cell, agrees=cell.tp == 1)
        )
        monkeypatch.setattr("parity.matrix.preload", lambda device: None)
        savings = [
            SavingCell(model=model, tp=tp, trained=trained)
            for model in MODELS
            for tp in (1, 2)
            for trained in TRAINED
        ]
        part = replace(PARTS["savings"], cells=lambda: savings)
        monkeypatch.setitem(PARTS, "savings", part)
        flags = ["--folder", str(tmp_path / "runs"), "--pages", str(tmp_path)]
        code = main([*flags, "--sample", "12", "--json", str(tmp_path / "results.json")])
        written = json.loads((tmp_path / "results.json").read_text())
        assert len(written) == 12 * len(PARTS)
        assert code == 1
        assert not all(each["agrees"] for each in written)
        assert f"12 of {len(layout_cells())} cells" in (tmp_path / "parity.md").read_text()
        page = (tmp_path / "parity_savings.md").read_text()
        assert f"12 of {len(savings)} cells" in page
        whole = len(PARTS["overlap"].cells())
        assert f"12 of {whole} cells" in (tmp_path / "parity_overlap.md").read_text()
        main([*flags, "--sample", "2", "--part", "savings"])
        assert "12 of" in (tmp_path / "parity.md").read_text()
        assert "2 of" in (tmp_path / "parity_savings.md").read_text()

    def test_the_page_shows_every_outcome(self):
        full = {"mode": FULL, "encoder_tp": 2, "tp": 4, "dp": 2}
        results = [
            figures(CELL, loss=3e-7),
            figures(Cell(model="qwen3_vl_tiny", dp=2), agrees=False),
            Result(cell=Cell(model="qwen3_vl_tiny", pp=4), failed="Traceback\nKeyError: 'a'"),
            figures(Cell(model="qwen3_vl_tiny", **full, balance=True), gradients=5e-6),
            figures(Cell(model="qwen3_vl_tiny", **full, recompute="both"), agrees=False),
        ]
        text = layouts_page(results, 9, "abc")
        assert "5 of 9 cells: 2 agree, 3 do not. The code had the digest `abc`." in text
        assert text.count("| agrees |") == 2
        assert text.count("| **differs** |") == 2
        assert text.count("| **failed** |") == 1
        for line in (
            "| uniform | 3 | 1 | 2.0e-06 | 1.0e-07 | 3.0e-07 | 1.0e-08 |",
            "| uniform, encoder TP below TP | 1 | 1 | 2.0e-06 | 1.0e-07 | 3.0e-07 | 1.0e-08 |",
            f"| {ENCODER_DP} | 0 | 0 |  |  |  |  |",
            f"| {FULL} | 2 | 1 | 5.0e-06 | 1.0e-07 | 1.0e-07 | 1.0e-08 |",
            f"| {FULL} with balance | 1 | 1 | 5.0e-06 | 1.0e-07 | 1.0e-07 | 1.0e-08 |",
            "| all | 5 | 2 | 5.0e-06 | 1.0e-07 | 3.0e-07 | 1.0e-08 |",
            f"| {FULL} | 2 | 4 | 1 | 1 | 2 | 1 |  | none |  | plain | yes | 5.0e-06 | 1.0e-07 |"
            " 1.0e-07 | 1.0e-08 | agrees |",
            "| `tp4_llm_tp2dp2_vision` | 4 / 1 / 2 | 2 / 1 / 4 | 2 | agrees, **differs** |",
            "| `pp4_llm_tp4_vision` | 1 / 4 / 2 | 4 / 1 / 2 | 0 | not run |",
        ):
            assert f"{line}\n" in text
        columns = {
            line.count("|") for line in text.splitlines() if line.startswith("| uniform | 1")
        }
        assert columns == {18}
        assert [outcome(result) for result in results[:3]] == [
            "agrees (2.0e-06)",
            "differs (2.0e-06)",
            "failed: KeyError: 'a'",
        ]

    def test_the_page_of_savings_shows_what_trains_and_what_is_away(self):
        cell = SavingCell(model="qwen3_vl_tiny", mode=FULL, pp=2, away="state")
        frozen = replace(cell, trained="the decoder", away="nothing")
        results = [figures(cell), figures(frozen, agrees=False, gradients=3e-2)]
        text = savings_page(results, 5, "abc")
        for line in (
            "2 of 5 cells: 1 agree, 1 do not. The code had the digest `abc`.",
            "| all | 1 | 1 | 2.0e-06 | 1.0e-07 | 1.0e-07 | 1.0e-08 |",
            "| the decoder | 1 | 0 | 3.0e-02 | 1.0e-07 | 1.0e-07 | 1.0e-08 |",
            "| state | 1 | 1 | 2.0e-06 | 1.0e-07 | 1.0e-07 | 1.0e-08 |",
            "| full-hetero-dp | 1 | 1 | 2 | 1 | 1 | 1 |  | none |  | plain |  | all | state |"
            " 2.0e-06 | 1.0e-07 | 1.0e-07 | 1.0e-08 | agrees |",
        ):
            assert f"{line}\n" in text

    @pytest.mark.parametrize("cell", [CELL, SavingCell(model="qwen3_vl_tiny", trained="all")])
    def test_a_result_survives_the_file(self, tmp_path, monkeypatch, cell):
        monkeypatch.setattr(Matrix, "_run", lambda self, cell, folder: figures(cell, failed="why"))
        ran = Matrix(tmp_path).run(cell)
        assert Matrix(tmp_path).known()[cell.name] == ran


@pytest.mark.quick
def test_results_hang_on_the_product_and_on_the_cells():
    names = {file.name for file in code_files()}
    assert {"exchange.py", "run.py", "cells.py", "qwen3_vl_tiny.yaml"} <= names
