"""How many samples a second one worker makes the text parts of, media by their headers only."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from digits.make import make_demo_data
from rich.console import Console
from rich.table import Table

from loongplug.data.blend import open_rows
from loongplug.data.dataset import ChatDataset
from loongplug.data.processor_folder import load_processor
from loongplug.data.tokens import TrainingPhase
from loongplug.data.video import video_style_of

_CHUNK = 16  # samples at a time, as a worker is asked for them
_UNBOUNDED = 2**62  # a sequence length: samples of any length are made


@dataclass(frozen=True, kw_only=True)
class DataFigures:
    """What was measured: seconds of each round over all samples, in one process."""

    samples: int
    media: int  # images and videos of all samples
    tokens: int
    training_phase: TrainingPhase
    processor_seconds: tuple[float, ...]
    wall_seconds: tuple[float, ...]

    @property
    def per_processor_second(self) -> float:
        """Samples per second of processor time, whatever else the machine does; the median."""
        return self.samples / median(self.processor_seconds)

    @property
    def per_second(self) -> float:
        """Samples per second on the clock; the median."""
        return self.samples / median(self.wall_seconds)

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        rates = {
            "samples_per_processor_second": self.per_processor_second,
            "samples_per_second": self.per_second,
        }
        path.write_text(json.dumps({**asdict(self), **rates}, indent=2) + "\n")


def run(
    *,
    files: Sequence[str],
    tokenizer_model: Path | None,
    training_phase: TrainingPhase,
    samples: int,
    rounds: int,
    json_path: Path | None = None,
) -> DataFigures:
    """Measure, print a table, and write the figures to ``json_path`` if given.

    Without ``files``, the demo's rows are made in a temporary folder, ``samples`` of them.

    Raises:
        ValueError: files without a ``tokenizer_model``, or a row that cannot be used.
    """
    if files and tokenizer_model is None:
        raise ValueError("--tokenizer-model is missing: name the folder of the model's tokenizer.")
    with tempfile.TemporaryDirectory(prefix="loongplug-bench-") as folder:
        if not files:
            make_demo_data(Path(folder), train=samples, test=1)
            files, tokenizer_model = [f"{folder}/train.jsonl"], Path(folder) / "processor"
        assert tokenizer_model is not None
        processor = load_processor(tokenizer_model)
        dataset = ChatDataset(
            open_rows(files, flag="FILES", seed=0),
            processor=processor,
            seq_length=_UNBOUNDED,
            training_phase=training_phase,
            video_style=video_style_of(processor.folder),
            cache_bytes=0,
        )
        figures = measure(dataset, training_phase=training_phase, samples=samples, rounds=rounds)
    _print(figures)
    if json_path is not None:
        figures.write(json_path)
    return figures


def measure(
    dataset: ChatDataset, *, training_phase: TrainingPhase, samples: int, rounds: int
) -> DataFigures:
    """Make the text parts of the first ``samples`` rows, ``rounds`` times; nothing is kept."""
    count = min(samples, len(dataset))
    chunks = [range(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
    media = tokens = 0
    for chunk in chunks:  # unmeasured: what is loaded once is loaded, and no row is bad
        parts = [dataset[index] for index in chunk]
        media += sum(len(part.extent.numbers) for part in parts)
        tokens += sum(len(part) for part in parts)
    busy, clock = [], []
    for _ in range(rounds):
        wall, processor = perf_counter(), process_time()
        for chunk in chunks:
            dataset.text_parts(chunk)
        busy.append(process_time() - processor)
        clock.append(perf_counter() - wall)
    return DataFigures(
        samples=count,
        media=media,
        tokens=tokens,
        training_phase=training_phase,
        processor_seconds=tuple(busy),
        wall_seconds=tuple(clock),
    )


def _print(figures: DataFigures) -> None:
    table = Table(
        "text parts",
        "samples/s, median",
        "range",
        title=(
            f"{figures.samples:,} samples ({figures.training_phase}), {figures.media:,} images and"
            f" videos, {figures.tokens:,} tokens"
        ),
        caption=f"one process, {len(figures.wall_seconds)} rounds, headers of media only",
    )
    for name, rate, seconds in (
        ("by processor time", figures.per_processor_second, figures.processor_seconds),
        ("by the clock", figures.per_second, figures.wall_seconds),
    ):
        least, most = figures.samples / max(seconds), figures.samples / min(seconds)
        table.add_row(name, f"{rate:,.0f}", f"{least:,.0f} to {most:,.0f}")
    Console().print(table)
