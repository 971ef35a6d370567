"""What torch's profiler wrote of one step: kernels, copies, and waits of the host."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_steps.timing import wait_for

type Span = tuple[float, float]  # begin and end, in microseconds

_KERNELS, _COPIES, _OPERATORS = "kernel", "gpu_memcpy", "cpu_op"
_ON_DEVICE = (_KERNELS, _COPIES, "gpu_memset")
_SEEN = (*_ON_DEVICE, "cuda_runtime", "cuda_driver", _OPERATORS)
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_OWN_WAIT = "cudaDeviceSynchronize"
_TOP = 30


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """All launches of one kernel; of one operator where there is no device."""

    name: str
    ms: float
    launches: int


@dataclass(frozen=True, kw_only=True)
class KernelTrace:
    """One step. Where nothing ran on a device, ``top`` are the host's operators."""

    ms: float
    launches: int
    busy: float | None  # share of the time in which the device computes or copies
    top: tuple[KernelTime, ...]
    waits: int  # of the host, on purpose or not
    wait_ms: float
    pageable_copies: int
    copy_ms: float
    copy_beside_compute: float | None  # share of the copies' time in which a kernel runs


class Profiled:
    """Torch's profiler, from when it is made until :meth:`end`.

    On a GPU it looks at the device and at the calls of CUDA only: to note every operator would
    slow the host down, and with it the share of time in which the device is busy.
    """

    def __init__(self, path: Path, *, device: str) -> None:
        """``path`` is for the profiler's own file."""
        activity = torch.profiler.ProfilerActivity
        self._path = path
        self._device = device
        self._profiler = torch.profiler.profile(
            activities=[activity.CUDA if device == "cuda" else activity.CPU]
        )
        wait_for(device)
        self._profiler.start()

    def end(self) -> KernelTrace:
        """What was done meanwhile."""
        wait_for(self._device)
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._path))
        content = json.loads(self._path.read_text(encoding="utf-8"))
        return trace_of(content["traceEvents"])


def trace_of(events: Iterable[dict[str, Any]]) -> KernelTrace:
    """Sum the events up."""
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") in _SEEN]
    of_device = [event for event in timed if event["cat"] in _ON_DEVICE]
    kernels = [event for event in of_device if event["cat"] == _KERNELS]
    copies = [event for event in of_device if event["cat"] == _COPIES]
    waits = sorted((e for e in timed if e["name"] in _WAITS), key=lambda event: event["ts"])
    if waits and waits[-1]["name"] == _OWN_WAIT:
        waits.pop()  # that of Profiled.end
    begin = min((event["ts"] for event in timed), default=0.0)
    end = max((event["ts"] + event["dur"] for event in timed), default=0.0)
    copied = joined(map(_span, copies))
    computed = joined(map(_span, kernels))
    copy_time = length(copied)
    shown = kernels or [event for event in timed if event["cat"] == _OPERATORS]
    return KernelTrace(
        ms=(end - begin) / 1e3,
        launches=len(kernels),
        busy=length(joined(map(_span, of_device))) / (end - begin) if of_device else None,
        top=_top(shown),
        waits=len(waits),
        wait_ms=sum(event["dur"] for event in waits) / 1e3,
        pageable_copies=sum("Pageable" in event["name"] for event in copies),
        copy_ms=copy_time / 1e3,
        copy_beside_compute=overlap(copied, computed) / copy_time if copy_time else None,
    )


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not touch each other, ascending."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(spans: Sequence[Span]) -> float:
    """Of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def overlap(some: Sequence[Span], others: Sequence[Span]) -> float:
    """The time that is in both; each is joined."""
    return length(some) + length(others) - length(joined([*some, *others]))


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _top(events: Sequence[dict[str, Any]]) -> tuple[KernelTime, ...]:
    time: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in events:
        time[event["name"]] += event["dur"]
        launches[event["name"]] += 1
    return tuple(
        KernelTime(name=name, ms=spent / 1e3, launches=launches[name])
        for name, spent in time.most_common(_TOP)
    )
