"""Conversion in both directions against a plain copy of the same folder, and its memory."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from loongplug.bench.step import spread
from micro import environment
from micro.random_folder import write_random_folder

_MIB = 2**20
# The folder's tokenizer is a tiny one, whose special tokens have ids of their own.
_IDS_OF_THE_TOKENIZER = tuple(
    f"model.{name}_token_id=null" for name in ("image", "video", "vision_start", "vision_end")
)


@dataclass(frozen=True)
class Direction:
    """All rounds of one direction."""

    seconds: tuple[float, ...]
    peak_memory_bytes: int  # the worst rank's
    memory_limit_bytes: int  # that rank's shard times 1.2, plus the largest tensor


@dataclass(frozen=True)
class ConvertFigures:
    """The copy and both directions, round by round: from the disk, and until all is on the disk."""

    model: str
    ranks: int
    folder_bytes: int
    copy_seconds: tuple[float, ...]
    to_checkpoint: Direction
    to_folder: Direction


def bench_convert(
    *,
    model_name: str,
    layout: Sequence[str],
    ranks: int,
    rounds: int,
    where: Path | None,
    json_path: Path | None,
) -> ConvertFigures:
    """Measure and print a table; takes four times the folder's size below ``where``.

    Raises:
        ValueError: a conversion failed; its own message has been printed by then.
    """
    with tempfile.TemporaryDirectory(dir=where) as name:
        root = Path(name)
        write_random_folder(root / "hf", model_name=model_name)

        def convert(*ends: str | Path) -> list[dict[str, float]]:
            flags = ["--model-name", model_name, "--device", "cpu", *layout]
            return _convert(root, [*flags, *map(str, ends), *_IDS_OF_THE_TOKENIZER], ranks=ranks)

        copies: list[float] = []
        there: list[list[dict[str, float]]] = []
        back: list[list[dict[str, float]]] = []
        for _ in track(range(rounds), "rounds", console=Console(stderr=True)):
            _forget(root / "hf")
            copies.append(_timed(lambda: shutil.copytree(root / "hf", root / "copy")))
            shutil.rmtree(root / "copy")
            _forget(root / "hf")
            there.append(convert("--load-hf", root / "hf", "--save", root / "checkpoint"))
            _forget(root / "checkpoint")
            back.append(convert("--load", root / "checkpoint", "--save-hf", root / "back"))
            shutil.rmtree(root / "checkpoint")
            shutil.rmtree(root / "back")
        figures = ConvertFigures(
            model=model_name,
            ranks=ranks,
            folder_bytes=sum(file.stat().st_size for file in (root / "hf").iterdir()),
            copy_seconds=tuple(copies),
            to_checkpoint=_direction(there),
            to_folder=_direction(back),
        )
    _print(figures)
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(figures), indent=2) + "\n")
    return figures


def _forget(folder: Path) -> None:
    """Have the next reader of the folder's files wait for the disk, whichever side it is."""
    os.sync()
    for file in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _timed(work: Callable[[], object]) -> float:
    """Seconds until what was written is on the disk."""
    begin = time.monotonic()
    work()
    os.sync()
    return time.monotonic() - begin


def _convert(root: Path, flags: Sequence[str], *, ranks: int) -> list[dict[str, float]]:
    """Every rank's figures; the time after the conversion until all is on the disk counts."""
    figures = root / "figures.json"
    command = [
        sys.executable,
        *("-m", "loongplug.parallel.launch", "--standalone", f"--nproc-per-node={ranks}"),
        *("-m", "micro.convert_worker", str(figures), *flags),
    ]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment(), check=False)
    if ended.returncode != 0:
        raise ValueError(f"the measured conversion ended with exit code {ended.returncode}")
    flushing = _timed(lambda: None)
    measured: list[dict[str, float]] = json.loads(figures.read_text())
    return [{**rank, "seconds": rank["seconds"] + flushing} for rank in measured]


def _direction(rounds: Sequence[Sequence[dict[str, float]]]) -> Direction:
    def limit(rank: dict[str, float]) -> float:
        return 1.2 * rank["shard_bytes"] + rank["largest_tensor_bytes"]

    worst = max(
        (rank for ranks in rounds for rank in ranks),
        key=lambda rank: rank["peak_memory_bytes"] / limit(rank),
    )
    return Direction(
        seconds=tuple(max(rank["seconds"] for rank in ranks) for ranks in rounds),
        peak_memory_bytes=int(worst["peak_memory_bytes"]),
        memory_limit_bytes=int(limit(worst)),
    )


def _print(figures: ConvertFigures) -> None:
    table = Table(
        title=f"{figures.model}, {figures.folder_bytes / _MIB:,.0f} MiB, {figures.ranks} rank(s)"
    )
    for column in ("work", "s, median (range)", "x copy", "peak MiB per rank", "limit MiB"):
        table.add_column(column)
    copy = median(figures.copy_seconds)
    table.add_row("copy", spread(figures.copy_seconds, form=".1f"), "1.00", "", "")
    for name, direction in (
        ("folder to checkpoint", figures.to_checkpoint),
        ("checkpoint to folder", figures.to_folder),
    ):
        table.add_row(
            name,
            spread(direction.seconds, form=".1f"),
            f"{median(direction.seconds) / copy:.2f}",
            f"{direction.peak_memory_bytes / _MIB:,.0f}",
            f"{direction.memory_limit_bytes / _MIB:,.0f}",
        )
    Console().print(table)
