"""What ``--trace`` costs a training step: runs with and without it, in turn."""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from loongplug.bench.step import measure_step, spread
from loongplug.observe.recorder import TraceRecorder
from loongplug.observe.trace_file import TraceWriter, rank_file, read_folder


@dataclass(frozen=True, kw_only=True)
class TraceCost:
    """Seconds of each measured step on both sides, and what a step of one rank leaves on disk."""

    plain_seconds: tuple[float, ...]
    traced_seconds: tuple[float, ...]
    events_per_step: float
    bytes_per_step: float
    event_seconds: float  # of the processor, to take down and to write one event

    @property
    def ratio(self) -> float:
        """The median traced step over the median plain one."""
        return median(self.traced_seconds) / median(self.plain_seconds)

    @property
    def share(self) -> float:
        """What a step's events take of the processor's time, of the median plain step."""
        return self.events_per_step * self.event_seconds / median(self.plain_seconds)


def event_seconds(*, events: int = 20_000) -> float:
    """Processor time of one event with a microbatch and a chunk, on the host's clock.

    Unlike the ratio of steps, it hardly depends on what else the machine does.
    """
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(Path(folder), rank=0, world_size=1, device="cpu")
        recorder = TraceRecorder(writer.write)
        before = time.process_time()
        for number in range(events):
            with recorder.span("forward", "forward", microbatch=number, chunk=0):
                pass
        recorder.close()
        spent = time.process_time() - before
        writer.close()
    return spent / events


def measure_trace(
    flags: Sequence[str], *, ranks: int, warmup: int, steps: int, rounds: int
) -> TraceCost:
    """Run the training that ``flags`` describe ``rounds`` times each without and with a trace.

    Raises ValueError when a run fails, or when the losses of both sides are not the same.
    """
    plain: list[float] = []
    traced: list[float] = []
    losses = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(rounds):
            for seconds, more in ((plain, []), (traced, [f"--trace={folder}"])):
                figures = measure_step(
                    [*flags, *more], ranks=ranks, warmup=warmup, steps=steps, environment={}
                )
                seconds.extend(figures.step_seconds)
                losses.add(figures.losses)
        if len(losses) > 1:
            raise ValueError(
                "the runs' losses differ: expected the same of every run; make the run"
                " deterministic to compare its steps."
            )
        traces = read_folder(folder)
        events = sum(len(each.events) for each in traces)
        size = sum(rank_file(folder, each.rank).stat().st_size for each in traces)
    all_steps = ranks * (warmup + steps)
    return TraceCost(
        plain_seconds=tuple(plain),
        traced_seconds=tuple(traced),
        events_per_step=events / all_steps,
        bytes_per_step=size / all_steps,
        event_seconds=event_seconds(),
    )


def bench_trace(
    flags: Sequence[str],
    *,
    ranks: int,
    warmup: int,
    steps: int,
    rounds: int,
    json_path: Path | None,
) -> TraceCost:
    """Measure and print a table; write the figures to ``json_path`` if given. Raises as above."""
    console = Console()
    with console.status(f"{rounds} runs on each side, of {warmup} + {steps} steps"):
        cost = measure_trace(flags, ranks=ranks, warmup=warmup, steps=steps, rounds=rounds)
    table = Table("figure", "median (range)", title=f"{steps} steps x {rounds} on {ranks} rank(s)")
    for name, seconds in (
        ("ms per step", cost.plain_seconds),
        ("ms per step with --trace", cost.traced_seconds),
    ):
        table.add_row(name, spread([each * 1e3 for each in seconds], form=",.1f"))
    table.add_row("ratio of the medians", f"{cost.ratio:.3f}")
    table.add_row("events per step and rank", f"{cost.events_per_step:,.0f}")
    table.add_row("processor time of an event, µs", f"{cost.event_seconds * 1e6:,.1f}")
    table.add_row("of all events, per plain step", f"{cost.share:.2%}")
    table.add_row("KB per step and rank", f"{cost.bytes_per_step / 1e3:,.1f}")
    console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(cost), indent=2) + "\n")
    return cost
