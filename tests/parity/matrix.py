"""The parity matrix: every cell against its single rank. ``python -m parity.matrix``.

Cells that were run before, by the same code, are not run again: an interrupted run goes on.
"""

import argparse
import hashlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from free_passes import free_passes

import loongplug
from loongplug.verify.forked_runs import preload, record
from loongplug.verify.plan import LEARNING_RATE
from loongplug.verify.ranks import OnEvent, RankError, run_ranks
from parity.bits import bits_of, first_difference
from parity.cells import Cell
from parity.page import Result, page
from parity.parts import PARTS, cells_of, sample
from parity.prepared import length_of, prepare, prepare_adapters

STEPS = 2
_BIT_STEPS = 3
_SECONDS = 300.0  # for one run


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
        mine = [line for line in lines if line.pop("code") == self._code]
        found = [Result(**{**line, "cell": Cell(**line["cell"])}) for line in mine]
        return {result.cell.name: result for result in found}

    def prepare(self, cell: Cell) -> None:
        """Make what the cell shares with others, where it is not there: its reference's run too."""
        self._reference(cell, self.base(cell))

    def run(self, cell: Cell) -> Result:
        """Run one cell and keep what it came to; its recordings go."""
        begun = time.monotonic()
        with self._new() as folder:
            result = replace(self._run(cell, folder), seconds=time.monotonic() - begun)
        line = json.dumps(asdict(result) | {"code": self._code}) + "\n"
        with self._results.open("ab", buffering=0) as file:  # whole lines, of several jobs
            file.write(line.encode())
        return result

    def _run(self, cell: Cell, folder: Path) -> Result:
        from loongplug.verify.compare import compare
        from loongplug.verify.recorded_run import read_recording

        try:
            base = self.base(cell)
            flags = [*base, *cell.flags()]
            expected = self._reference(cell, base)
            found = _recorded(folder / "layout", flags, ranks=cell.ranks, freely=cell.streams)
            comparison = compare(read_recording(found), read_recording(expected))
            bits = self._bits(cell, base, folder) if cell.overlap else ""
        except (ValueError, RankError) as error:
            return Result(cell=cell, failed=str(error))
        worst = {what: comparison.worst(what) for what in ("gradients", "parameters")}
        return Result(
            cell=cell,
            agrees=comparison.agrees and not bits,
            bits=bits,
            gradients=None if worst["gradients"] is None else worst["gradients"].error,
            parameters=None if worst["parameters"] is None else worst["parameters"].error,
            gradient_norm=max(norm.error for norm in comparison.norms),
            loss=max(loss.error for loss in comparison.losses),
        )

    def _bits(self, cell: Cell, base: Sequence[str], folder: Path) -> str:
        """Where the cell in bf16 parts from the same layout without the overlap."""
        shared = [*base, "--bf16", "--train-iters", str(_BIT_STEPS)]
        twin = replace(cell, overlap=False, kept="all", delayed=False)
        found, expected = (
            bits_of(
                [*shared, *each.flags()], ranks=cell.ranks, folder=folder / name, timeout=_SECONDS
            )
            for name, each in (("bits", cell), ("twin", twin))
        )
        decoding = found[: cell.decoder_ranks]
        if not all(rank.nodes for rank in decoding) or any(rank.nodes for rank in expected):
            return "the overlapped schedule did not run, or ran in both"
        if all(image for rank in found for image in rank.images):
            return "no microbatch was without images"
        return first_difference(found, expected)

    def _reference(self, cell: Cell, base: Sequence[str]) -> Path:
        """The single rank's recording, made once for all cells that share it."""
        folder = self._folder / f"references/{self._code}/{cell.reference}"
        self._once(folder, lambda made: _recorded(made, base, ranks=1))
        return folder

    @contextmanager
    def _new(self) -> Iterator[Path]:
        """A folder of its own, gone afterwards: nothing that was there before ever is removed."""
        with tempfile.TemporaryDirectory(prefix="running-", dir=self._folder) as name:
            yield Path(name)

    def base(self, cell: Cell) -> list[str]:
        """The flags that a cell shares with its reference; data, model and weights are there."""
        prepared = self._folder / "prepared" / self._code / cell.weights
        self._once(prepared, lambda made: _in_child(lambda: prepare(cell, made)))
        adapters = prepared.with_name(f"{cell.reference}-adapters")
        shared = cell.shared_flags()
        self._once(
            adapters,
            lambda made: _in_child(lambda: prepare_adapters(shared, prepared, folder=made)),
        )
        return [
            *("--device", "cpu", "--config-file", str(prepared / "model.yaml")),
            *("--tokenizer-model", str(prepared / "processor")),
            *("--train-data-path", str(prepared / (prepared / "rows").read_text(encoding="utf-8"))),
            *("--load-hf", str(prepared / "weights"), "--training-phase", "sft"),
            *("--seq-length", str(length_of(cell.model, divides=cell.divides))),
            *("--micro-batch-size", str(cell.micro_batch)),
            *("--global-batch-size", str(cell.batch), "--train-iters", str(STEPS)),
            *("--lr", str(LEARNING_RATE), "--lr-decay-style", "constant", "--log-interval", "1"),
            *("--rerun-mode", "disabled", *shared),
            *(("--load-lora", str(adapters / "lora")) if (adapters / "lora").is_dir() else ()),
        ]

    def _once(self, folder: Path, make: Callable[[Path], Any]) -> None:
        """Have ``make`` fill a folder, which then becomes ``folder``, unless that is there."""
        if folder.is_dir():
            return
        with self._new() as place:
            make(place / "made")
            folder.parent.mkdir(parents=True, exist_ok=True)
            (place / "made").rename(folder)


def _recorded(folder: Path, flags: Sequence[str], *, ranks: int, freely: bool = False) -> Path:
    """With ``freely``, a step that streams has many passes; see :func:`free_passes`."""
    return record(
        flags,
        ranks=ranks,
        device="cpu",
        folder=folder,
        timeout=_SECONDS,
        record_rank=_record_freely if freely else None,
    )


def _record_freely(rank: int, tell: OnEvent, **options: Any) -> None:
    from loongplug.verify.step_recorder import record_run

    free_passes(rank)
    record_run(rank, tell, **options)


def _in_child(function: Callable[[], None]) -> None:
    """Run it in a process of its own, which leaves no trace in this one."""
    with tempfile.TemporaryDirectory() as name:
        run_ranks(lambda rank, tell: function(), 1, folder=Path(name))


def code_digest() -> str:
    """A name for what results depend on: the product, its configs, and the cells."""
    from loongplug.training.model_files import own_folder

    folders = (Path(loongplug.__file__).resolve().parent, Path(__file__).resolve().parent)
    code = [file for folder in folders for file in folder.rglob("*.py")]
    digest = hashlib.sha256()
    for file in sorted([*code, *own_folder().rglob("*.yaml")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run_cells(cells: Sequence[Cell], *, folder: Path, jobs: int = 1) -> list[Result]:
    """Results of all cells, run now or before; ``jobs`` of them at one time.

    Raises:
        ValueError, RankError: what cells share could not be made.
    """
    matrix = Matrix(folder)
    known = matrix.known()
    new = [cell for cell in cells if cell.name not in known]
    for cell in {each.reference: each for each in new}.values():
        matrix.prepare(cell)
    # Those of many ranks first: what is left at the end is short.
    new.sort(key=lambda cell: (-cell.ranks, cell))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        for number, result in enumerate(pool.map(matrix.run, new), start=1):
            known[result.cell.name] = result
            told = f"{number} of {len(new)}: {result.cell.name}: {result.outcome}"
            print(told, file=sys.stderr, flush=True)
    return [known[cell.name] for cell in cells]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix, or a sample of it, and write its pages; 1 when a cell does not agree."""
    parser = argparse.ArgumentParser(prog="parity_matrix.sh", description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="only one of the pages' cells")
    parser.add_argument("--sample", type=int, metavar="N", help="only N cells of each part")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="N cells at a time (1)")
    parser.add_argument("--seed", type=int, default=0, help="which sample (0)")
    parser.add_argument("--folder", type=Path, default=Path("runs/parity"), help="runs/parity")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}: expected 1 or more")
    preload("cpu")
    agree = [_run_part(name, options) for name in PARTS if options.part in (None, name)]
    return 0 if all(agree) else 1


def _run_part(name: str, options: argparse.Namespace) -> bool:
    """Run the part's cells, or a sample of them, and write its page; whether all agree."""
    whole = cells_of(name)
    cells = whole if options.sample is None else sample(whole, options.sample, seed=options.seed)
    results = run_cells(cells, folder=options.folder, jobs=options.jobs)
    text = page(name, results, about=PARTS[name].about, whole=len(whole), code=code_digest())
    file = options.folder / "pages" / f"{name}.md"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    wrong = sum(not result.agrees for result in results)
    print(f"{len(results)} cells, {wrong} do not agree; {file}", flush=True)
    return not wrong


if __name__ == "__main__":
    raise SystemExit(main())
