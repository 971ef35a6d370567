"""Tokens per second and peak memory of a training step, measured on the real training run.

``-m loongplug.bench.step FIGURES WARMUP FLAGS`` is one of its ranks.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter
from rich.table import Table

from loongplug.consoles import table_console
from loongplug.output_files import write_figures
from loongplug.parallel.rank_programs import ranks_command

_WRITING_FLAGS = {
    *("--save", "--save-hf", "--save-lora", "--metrics-json", "--tensorboard-dir", "--trace")
}


@dataclass(frozen=True)
class StepFigures:
    """What a run measured after its warm-up. Tokens are counted before padding."""

    ranks: int
    warmup: int
    step_seconds: tuple[float, ...]
    step_tokens: tuple[int, ...]
    losses: tuple[float, ...]  # warm-up included
    peak_memory_bytes: tuple[int, ...]  # of every rank

    @property
    def tokens_per_second(self) -> tuple[float, ...]:
        """The rate of each step."""
        pairs = zip(self.step_tokens, self.step_seconds, strict=True)
        return tuple(tokens / seconds for tokens, seconds in pairs)


def measure_step(
    flags: Sequence[str], *, ranks: int, warmup: int, steps: int, environment: dict[str, str]
) -> StepFigures:
    """Run ``warmup + steps`` iterations of the training that ``flags`` describe."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = ranks_command(
            *("-m", "loongplug.bench.step", str(figures), str(warmup)),
            *flags,
            *(f"--train-iters={warmup + steps}", "--log-interval=1"),
            "--lr-decay-iters=1000000",  # so short a run is all warm-up by most schedules
            ranks=ranks,
        )
        environment = {**os.environ, **environment}
        ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if ended.returncode != 0:
            raise ValueError(
                f"the measured run ended with exit code {ended.returncode}; correct its flags: "
                + " ".join(flags)
            )
        return TypeAdapter(StepFigures).validate_json(figures.read_bytes())


def spread(values: Sequence[float], *, form: str) -> str:
    """Median and range as text."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def bench_step(
    flags: Sequence[str], *, ranks: int, warmup: int, steps: int, json_path: Path | None
) -> StepFigures:
    """Measure and print a table; write the figures to ``json_path`` if given.

    Flags that write are refused: they would replace what a training run has kept.
    """
    if writes := [flag for flag in flags if flag.split("=")[0] in _WRITING_FLAGS]:
        raise ValueError(
            f"{', '.join(writes)}: a measured run is not a training run and keeps nothing; leave "
            "these flags out."
        )
    console = table_console()
    with console.status(f"running {warmup} + {steps} steps on {ranks} rank(s)"):
        figures = measure_step(flags, ranks=ranks, warmup=warmup, steps=steps, environment={})
    title = f"{steps} steps after {warmup} on {ranks} rank(s)"
    table = Table("figure", "median (range)", title=title)
    milliseconds = [seconds * 1e3 for seconds in figures.step_seconds]
    mebibytes = [peak / 2**20 for peak in figures.peak_memory_bytes]
    table.add_row("tokens/s", spread(figures.tokens_per_second, form=",.0f"))
    table.add_row("ms per step", spread(milliseconds, form=",.1f"))
    table.add_row("peak memory per rank, MiB", spread(mebibytes, form=",.0f"))
    console.print(table)
    write_figures(json_path, asdict(figures), "bench step")
    return figures


def _rank() -> None:
    """Train, then write what the steps after the warm-up took. Every rank enters."""
    path, warmup, flags = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    from loongplug.train import started

    with started(flags):
        import torch

        from loongplug.platform import current_platform
        from loongplug.training.progress import StepReport
        from loongplug.training.run import run

        def end_of_warmup(report: StepReport) -> None:
            if report.iteration == warmup:
                current_platform().reset_peak_memory()

        reports = run(flags, on_report=end_of_warmup)
        peaks: list[int] = [0] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(peaks, current_platform().peak_memory_bytes())
        if torch.distributed.get_rank() == 0:
            measured = reports[warmup:]
            figures = StepFigures(
                ranks=len(peaks),
                warmup=warmup,
                step_seconds=tuple(report.seconds for report in measured),
                step_tokens=tuple(report.tokens for report in measured),
                losses=tuple(report.loss for report in reports if report.loss is not None),
                peak_memory_bytes=tuple(peaks),
            )
            write_figures(path, asdict(figures), "bench step")


if __name__ == "__main__":
    _rank()
