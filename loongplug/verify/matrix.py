"""The parity matrix: every cell against its single rank. ``python -m loongplug.verify.matrix``.

Cells that were run before, by the same code, are not run again: an interrupted run goes on.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loongplug.verify.cells import Cell, all_cells, sample
from loongplug.verify.plan import LEARNING_RATE, SEED
from loongplug.verify.ranks import OnEvent, RankError, run_ranks
from loongplug.verify.results import Result, as_result, outcome
from loongplug.verify.runs import preload, record

STEPS = 2
_BATCH, _LENGTH, _SAMPLES = 8, 80, 64
_SECONDS = 300.0  # for one run
_LARGEST = 4  # any size of the axes divides it


class Matrix:
    """Runs cells in a folder that keeps data, weights, references and results."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._results = folder / "results.jsonl"
        self._code = code_digest()

    def known(self) -> dict[str, Result]:
        """Results of earlier runs of the same code, by the cell's name."""
        if not self._results.is_file():
            return {}
        lines = map(json.loads, self._results.read_text(encoding="utf-8").splitlines())
        found = [as_result(line) for line in lines if line.pop("code") == self._code]
        return {result.cell.name: result for result in found}

    def run(self, cell: Cell) -> Result:
        """Run one cell and keep what it came to."""
        begun = time.monotonic()
        result = replace(self._run(cell), seconds=time.monotonic() - begun)
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result) | {"code": self._code}) + "\n")
        return result

    def _run(self, cell: Cell) -> Result:
        from loongplug.verify.compare import compare
        from loongplug.verify.recording import read_recording

        try:
            base = self._base(cell)
            flags = [*base, *cell.flags()]
            expected = self._reference(cell, base)
            found = self._recorded("layout", flags, ranks=cell.ranks)
            comparison = compare(read_recording(found), read_recording(expected))
        except (ValueError, RankError) as error:
            return Result(cell=cell, failed=str(error))
        worst = {what: comparison.worst(what) for what in ("gradients", "parameters")}
        return Result(
            cell=cell,
            agrees=comparison.agrees,
            gradients=None if worst["gradients"] is None else worst["gradients"].error,
            parameters=None if worst["parameters"] is None else worst["parameters"].error,
            gradient_norm=max(norm.error for norm in comparison.norms),
            loss=max(loss.error for loss in comparison.losses),
        )

    def _recorded(self, name: str, flags: Sequence[str], *, ranks: int) -> Path:
        return record(
            flags, ranks=ranks, device="cpu", folder=self._folder / name, timeout=_SECONDS
        )

    def _reference(self, cell: Cell, base: Sequence[str]) -> Path:
        """The single rank's recording, made once for all cells that share it."""
        name = f"references/{self._code}/{cell.reference}"
        if (self._folder / name / "recording.json").is_file():
            return self._folder / name
        return self._recorded(name, base, ranks=1)

    def _base(self, cell: Cell) -> list[str]:
        """The flags that a cell shares with its reference; data, model and weights are there."""
        prepared = self._folder / "prepared" / self._code / cell.reference
        done = prepared / "done"
        if not done.is_file():
            _in_child(
                lambda: prepare(cell, prepared, demo=self._folder / "demo"),
                folder=self._folder / "child",
            )
            done.touch()
        return [
            *("--device", "cpu", "--config-file", str(prepared / "model.yaml")),
            *("--tokenizer-model", str(prepared / "processor")),
            *("--train-data-path", str(self._folder / "demo" / "train.jsonl")),
            *("--load-hf", str(prepared / "weights"), "--training-phase", "sft"),
            *("--seq-length", str(_LENGTH), "--micro-batch-size", "1"),
            *("--global-batch-size", str(_BATCH), "--train-iters", str(STEPS)),
            *("--lr", str(LEARNING_RATE), "--lr-decay-style", "constant", "--log-interval", "1"),
            *("--rerun-mode", "disabled"),
        ]


def _in_child(function: Callable[[], Any], *, folder: Path) -> Any:
    def run(rank: int, tell: OnEvent) -> Any:
        return function()

    (result,) = run_ranks(run, 1, folder=folder)
    return result


def prepare(cell: Cell, folder: Path, *, demo: Path) -> None:
    """Write the cell's model as YAML, its processor and its weights; the demo's data once."""
    import shutil

    from loongplug.data.demo import make_demo_data
    from loongplug.data.demo_processor import write_processor
    from loongplug.training.config import compose_model
    from loongplug.training.special_tokens import read_tokenizer, with_token_ids
    from loongplug.verify.tiny import Layout, as_overrides, tiny_sizes
    from loongplug.verify.weights import write_random_weights

    if not (demo / "train.jsonl").is_file():
        make_demo_data(demo, train=_SAMPLES, test=1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    composed = compose_model(model_name=cell.model)
    write_processor(folder / "processor", video_style=composed.config.video_style())
    tokenizer = read_tokenizer(folder / "processor")
    largest = Layout(tp=_LARGEST, ep=_LARGEST, etp=_LARGEST, encoder_tp=_LARGEST)
    sizes = tiny_sizes(composed.config, largest, vocabulary=tokenizer.size, demo_patches=True)
    sizes |= {
        "foundation.num_layers": cell.layers,
        "foundation.tie_word_embeddings": str(cell.tied).lower(),
    }
    composed = compose_model(model_name=cell.model, overrides=as_overrides(sizes))
    (folder / "model.yaml").write_text(
        "# @package _global_\n" + composed.to_yaml(), encoding="utf-8"
    )
    model = with_token_ids(
        composed.config, tokenizer, special_tokens=composed.family.special_tokens
    )
    write_random_weights(folder / "weights", composed.family.load_hugging_face(model), seed=SEED)


def code_digest() -> str:
    """A name for the code that results depend on."""
    from loongplug.paths import configs_dir

    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for file in sorted([*root.rglob("*.py"), *configs_dir().rglob("*.yaml")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run_cells(cells: Sequence[Cell], *, folder: Path, console: Console) -> list[Result]:
    """Results of all cells, run now or before."""
    matrix = Matrix(folder)
    known = matrix.known()
    results = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,  # its thread would be there when ranks are forked
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("cells", total=len(cells))
        # Cells of one reference follow each other.
        for cell in sorted(cells, key=lambda cell: (cell.reference, cell)):
            progress.update(task, description=cell.name, refresh=True)
            result = known.get(cell.name) or matrix.run(cell)
            results.append(result)
            if not console.is_terminal or not result.agrees:
                console.print(f"{cell.name}: {outcome(result)}", highlight=False, soft_wrap=True)
            progress.advance(task)
            progress.refresh()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix, or a sample of it, and write the page; 1 when a cell does not agree."""
    parser = argparse.ArgumentParser(prog="parity_matrix.sh", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results")
    parser.add_argument("--sample", type=int, metavar="N", help="only N cells")
    parser.add_argument("--seed", type=int, default=0, help="which sample (0)")
    parser.add_argument("--folder", type=Path, default=Path("runs/parity"), help="runs/parity")
    parser.add_argument("--page", type=Path, default=Path("docs/parity.md"), help="docs/parity.md")
    options = parser.parse_args(argv)
    preload("cpu")
    from loongplug.verify.parity_page import page

    whole = all_cells()
    cells = whole if options.sample is None else sample(whole, options.sample, seed=options.seed)
    results = run_cells(cells, folder=options.folder, console=Console(stderr=True))
    options.page.write_text(page(results, whole=len(whole), code=code_digest()), encoding="utf-8")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8"
        )
    wrong = [result for result in results if not result.agrees]
    print(f"{len(results)} cells, {len(wrong)} do not agree; {options.page}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
