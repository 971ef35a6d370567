"""A sampled part of the parity matrix, and how the matrix keeps what it has run."""

import io
import json
import os
from dataclasses import asdict, replace

import pytest
from eventually import eventually
from rich.console import Console

from loongplug.verify.ranks import RankError
from parity.cells import (
    BATCH,
    ENCODER_DP,
    FULL,
    MODELS,
    MODES,
    MOST_RANKS,
    Cell,
    layout_cells,
    sample,
)
from parity.matrix import PARTS, Matrix, code_files, main, run_cells
from parity.parity_page import layouts_page
from parity.results import Result, as_result, outcome
from parity.saving_cells import TRAINED, SavingCell, saving_cells

SEED, CELLS, MOST = 6, 3, 4
# Of each part, so that all of them are run in an hour or two.
MOST_CELLS = {"layouts": 680, "hearing": 40, "savings": 150, "overlap": 60, "context": 100}
MOST_CELLS |= {"streamed": 210, "placements": 110}


def figures(cell, **more):
    values = {"agrees": True, "gradients": 2e-6, "gradient_norm": 1e-7, "loss": 1e-7}
    return Result(cell=cell, **{**values, "parameters": 1e-8, **more})


CELL = Cell(model="qwen3_vl_tiny", encoder_tp=1, tp=2)


@pytest.mark.slow
def test_sampled_cells_agree(tmp_path):
    """A cell of each model and mode, of those that few ranks are enough for; a frozen decoder."""
    small = [cell for cell in layout_cells() if 1 < cell.ranks <= MOST]
    cells = sample(small, CELLS, seed=SEED)
    assert len({cell.model for cell in cells}) == CELLS
    assert {cell.mode for cell in cells} == set(MODES)
    assert {cell.balance for cell in cells} == {False, True}
    saving = (cell for cell in saving_cells() if cell.ranks == 2)
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


@pytest.mark.quick
@pytest.mark.not_quick
@pytest.mark.parametrize("name", PARTS)
def test_cells_are_the_same_every_time_can_be_run_and_come_back_from_the_file(name):
    part = PARTS[name]
    cells = part.cells()
    assert cells == part.cells()
    assert len({cell.name for cell in cells}) == len({*cells}) == len(cells) <= MOST_CELLS[name]
    for cell in cells:
        assert cell.ranks <= MOST_RANKS
        assert cell.layers % (cell.pp * cell.vpp) == 0
        assert name == "placements" or BATCH % cell.dp == 0  # which have batches of their own
        assert cell.vpp == 1 or cell.microbatches % cell.pp == 0  # which fill the pipeline
        result = figures(cell, bits="losses of rank 0 differ", seconds=2.0)
        assert as_result(json.loads(json.dumps(asdict(result)))) == result
    results = [figures(cell, agrees=cell is not cells[0]) for cell in cells]
    page = part.text(results, 999, "c0de")
    assert f"{len(cells)} of 999 cells: {len(cells) - 1} agree, 1 do not." in page
    assert page.count("| **differs** |\n") == 1
    assert page.count("| agrees |\n") >= len(cells) - 1  # and published layouts


@pytest.mark.quick
def test_results_hang_on_the_product_and_on_the_cells():
    names = {file.name for file in code_files()}
    assert {"exchange.py", "run.py", "cells.py", "qwen3_vl_tiny.yaml"} <= names
