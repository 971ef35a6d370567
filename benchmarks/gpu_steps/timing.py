"""Times and peaks of what a device does; on the CPU by the host's clock."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from gpu_steps.rows import Rows

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A function's first call, the median of later ones, and the most memory that was held."""

    first_ms: float
    ms: float
    peak_bytes: int | None  # beyond what was held before; None on the CPU


def stamp(device: str) -> Any:
    """This moment in the device's work, for :func:`milliseconds` when that is done."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Any, end: Any) -> float:
    """From one stamp to a later one; both are reached."""
    if isinstance(begin, float):
        return float(end - begin) * 1e3
    return float(begin.elapsed_time(end))


def wait_for(device: str) -> None:
    """Return when the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(function: Callable[[], object], *, device: str, rounds: int) -> Measured:
    """Call it once and then ``rounds`` times more, waiting for the device between them."""
    wait_for(device)
    before = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    function()
    wait_for(device)
    first = time.perf_counter() - began
    later = []
    for _ in range(rounds):
        begin = stamp(device)
        function()
        end = stamp(device)
        wait_for(device)
        later.append(milliseconds(begin, end))
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    return Measured(first_ms=first * 1e3, ms=median(later), peak_bytes=peak)


def attempt(
    rows: Rows,
    case: str,
    make: Callable[[], Callable[[], object]],
    *,
    operations: int,
    device: str,
    rounds: int,
) -> None:
    """A row of ``make()``'s function, or the reason why it cannot run here."""
    try:
        found = measure(make(), device=device, rounds=rounds)
    except Exception as error:  # whatever a kernel lacks here
        rows.missing(case, error)
    else:
        rows.put_figures(
            case,
            {
                "first ms": found.first_ms,
                "ms": found.ms,
                "TFLOP/s": operations / found.ms / 1e9 if operations else None,
                "more GiB": None if found.peak_bytes is None else found.peak_bytes / GIB,
            },
        )
    let_go(device)


def let_go(device: str) -> None:
    """Give the memory of what is no longer used back, before the next case."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
