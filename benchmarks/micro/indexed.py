"""What text costs a data parallel rank with packing, with an index of lengths and without one."""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import process_time

from digits.make import make_demo_data
from rich.console import Console
from rich.table import Table

from loongplug.data.dataset import ChatDataset
from loongplug.data.extent_index import ExtentTable, IndexedExtents
from loongplug.data.packing import LOOK_AHEAD
from loongplug.data.processor_folder import load_processor
from loongplug.data.sample_order import Packing, StepSizes, packs_of_epochs
from loongplug.data.source import LocalSource

_SEED = 1


@dataclass(frozen=True, kw_only=True)
class IndexedFigures:
    """Processor seconds of one rank in each round, for the packs of one epoch that are its own."""

    samples: int  # of the epoch, over all ranks
    dp_size: int
    without: tuple[float, ...]
    indexed: tuple[float, ...]

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def run(
    *, samples: int, dp_size: int, seq_length: int, rounds: int, json_path: Path | None = None
) -> IndexedFigures:
    """Measure on the demo's rows, print a table, and write the figures to ``json_path`` if given.

    Raises:
        ValueError: a sample is longer than ``seq_length``.
    """
    with tempfile.TemporaryDirectory(prefix="loongplug-bench-") as folder:
        make_demo_data(Path(folder), train=samples, test=1)
        dataset = ChatDataset(
            Path(folder) / "train.jsonl",
            processor=load_processor(Path(folder) / "processor"),
            seq_length=seq_length,
            training_phase="sft",
            cache_bytes=0,
        )
        surveys = (dataset.surveyor(dataset.rows, row) for row in range(samples))
        table = ExtentTable.of((each.extent, each.remarks) for each in surveys)
        extents = IndexedExtents(dataset.rows, (table,))
        turns = []
        for _ in range(rounds):
            dataset.extents = None
            read = _seconds(dataset, extents, dp_size=dp_size)
            dataset.extents = extents
            turns.append((read, _seconds(dataset, extents, dp_size=dp_size)))
    without, indexed = zip(*turns, strict=True)
    figures = IndexedFigures(samples=samples, dp_size=dp_size, without=without, indexed=indexed)
    _print(figures)
    if json_path is not None:
        figures.write(json_path)
    return figures


def _seconds(dataset: ChatDataset, extents: IndexedExtents, *, dp_size: int) -> float:
    """Processor seconds of the first rank, for its packs of the first epoch."""
    packs = packs_of_epochs(
        extents.lengths(seq_length=dataset.seq_length),
        seed=_SEED,
        packing=Packing(seq_length=dataset.seq_length, look_ahead=LOOK_AHEAD),
        epochs=1,
    )
    began = process_time()
    source = LocalSource(
        dataset,
        sizes=StepSizes.constant(dp_size),
        micro_batch_size=1,
        parts={0: None},
        dp_size=dp_size,
        seed=_SEED,
        encoders={},
        look_ahead=LOOK_AHEAD,
    )
    for _ in range(packs // dp_size):
        for microbatch in source.next_step():
            assert microbatch.samples
    return process_time() - began


def _print(figures: IndexedFigures) -> None:
    table = Table(
        "text of packs",
        "seconds of an epoch, median",
        "samples/s of the run, median",
        "range",
        title=f"{figures.samples:,} samples, one rank of DP {figures.dp_size}",
        caption=f"by processor time, one process, {len(figures.without)} rounds",
    )
    for name, seconds in (("without an index", figures.without), ("indexed", figures.indexed)):
        rates = [figures.samples / each for each in seconds]
        table.add_row(
            name,
            f"{median(seconds):.2f}",
            f"{median(rates):,.0f}",
            f"{min(rates):,.0f} to {max(rates):,.0f}",
        )
    Console().print(table)
