"""What a switch between parallel states costs."""

import gc
import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter_ns

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from loongplug.platform import activate, current_platform

WARM_UP = 1000


@dataclass(frozen=True)
class Times:
    """Microseconds of one kind of call, the clock's own share included."""

    median: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class SwitchFigures:
    """What was measured: switches to another state, and to the one in use."""

    device: str
    switches: int
    switch: Times
    to_the_same: Times

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def run(*, switches: int = 20_000, json_path: Path | None = None) -> SwitchFigures:
    """Measure, print a table, and write the figures to ``json_path`` if given.

    Uses the process's group, or makes one of this process alone for the time of the call.
    Megatron's parallel state must not be initialized.

    Raises:
        ValueError: ``switches`` is below 100, of which no 99th percentile could be told.
    """
    if switches < 100:
        raise ValueError(f"--switches is {switches}: expected at least 100.")
    activate("auto")
    with _group():
        figures = measure(switches=switches)
    _print(figures)
    if json_path is not None:
        figures.write(json_path)
    return figures


def measure(*, switches: int) -> SwitchFigures:
    """Time switches between a decoder's and an encoder's state; collective over the world."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from loongplug.parallel.layout import Layout
    from loongplug.parallel.states import (
        PARALLEL_STATES,
        TEXT_DECODER,
        adopt_parallel_state,
        create_parallel_state,
        destroy_parallel_states,
    )

    encoder = "encoder"
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    try:
        model_parallel_cuda_manual_seed(1)
        decoder = adopt_parallel_state()
        create_parallel_state(encoder, Layout(dp=decoder.world_size), seed=1)
        both, same = (encoder, TEXT_DECODER), (TEXT_DECODER, TEXT_DECODER)
        change = PARALLEL_STATES.switch
        _times(change, both, calls=WARM_UP)
        return SwitchFigures(
            device=current_platform().name,
            switches=switches,
            switch=_times(change, both, calls=switches),
            to_the_same=_times(change, same, calls=switches),
        )
    finally:
        destroy_parallel_states()
        parallel_state.destroy_model_parallel()


def _times(change: Callable[[str], None], names: tuple[str, str], *, calls: int) -> Times:
    # Memory of its own before the first call: a new page costs more than a switch.
    nanoseconds = array("q", [-1]) * calls
    gc.disable()
    try:
        for number in range(calls):
            name = names[number % 2]
            start = perf_counter_ns()
            change(name)
            nanoseconds[number] = perf_counter_ns() - start
    finally:
        gc.enable()
    ordered = sorted(nanoseconds)
    return Times(ordered[calls // 2] / 1e3, ordered[calls * 99 // 100] / 1e3)


@contextmanager
def _group() -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _print(figures: SwitchFigures) -> None:
    table = Table(
        "call",
        "median, µs",
        "p99, µs",
        title=f"PARALLEL_STATES.switch, {figures.switches:,} calls, {figures.device}",
    )
    for name, times in (
        ("to another state", figures.switch),
        ("to the state in use", figures.to_the_same),
    ):
        table.add_row(name, f"{times.median:.2f}", f"{times.p99:.2f}")
    Console().print(table)
