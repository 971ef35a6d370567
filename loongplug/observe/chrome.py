"""Traces of all ranks as one file of Chrome's trace format, which Perfetto opens.

A rank is a process with three lanes. Times are microseconds since the first event. Arrows lead from
a stage's send to its neighbour's receive, and between an encoder on other ranks and the decoder.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loongplug.observe.shares import TRANSFERS
from loongplug.observe.trace_file import RankTrace, TraceEvent
from loongplug.output_files import begins, write_output

MERGED = begins(rb'\{"traceEvents": \[\{"ph": "M", "name": "process_name", "pid": ')
_LANES = {  # with the phases that they show; all others are computing
    "computing": (),
    "communication": (*TRANSFERS, "exchange"),
    "data and files": ("data", "checkpoint"),
}

# What a send on the one side is on the other: the details of its bytes and of its peer.
_MATCHES = {
    "activations": (("sent_next", "next"), ("received_previous", "previous")),
    "gradients": (("sent_previous", "previous"), ("received_next", "next")),
}


def write_chrome_trace(traces: Sequence[RankTrace], path: Path) -> None:
    """Merge the traces of all ranks to one JSON file."""
    starts = [event.start for trace in traces for event in trace.events]
    origin = min(starts, default=0)
    rows = [row for trace in traces for row in _rank_rows(trace, origin)]
    rows += _arrows(traces, origin)
    write_output(path, json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}), MERGED)


def _rank_rows(trace: RankTrace, origin: int) -> Iterator[dict[str, Any]]:
    def named(what: str, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": trace.rank, "tid": 0, "args": args}

    yield named("process_name", name=f"rank {trace.label()}")
    yield named("process_sort_index", sort_index=trace.rank)
    for lane, name in enumerate(_LANES):
        yield {**named("thread_name", name=name), "tid": lane}
    for event in trace.events:
        row = {
            "name": _title(event),
            "cat": event.phase,
            "pid": trace.rank,
            "tid": next((n for n, those in enumerate(_LANES.values()) if event.phase in those), 0),
            "ts": (event.start - origin) / 1e3,
            "args": {"step": event.step, **event.details},
        }
        if event.phase == "switch":
            yield {**row, "ph": "i", "s": "t"}
        else:
            yield {**row, "ph": "X", "dur": (event.end - event.start) / 1e3}


def _title(event: TraceEvent) -> str:
    """The event's name with its microbatch and chunk, as the lane shows it."""
    microbatch, chunk = (event.details.get(each) for each in ("microbatch", "chunk"))
    title = event.name if microbatch is None else f"{event.name} {microbatch}"
    return title if chunk is None else f"{title} (chunk {chunk})"


def _arrows(traces: Iterable[RankTrace], origin: int) -> Iterator[dict[str, Any]]:
    """Pairs of flow events: the n-th send from one rank to another is its n-th receive there."""
    counts: Counter[tuple[bool, str, int, int]] = Counter()
    for trace in traces:
        for event in trace.events:
            for sends, what, other in _messages(event):
                ends = (trace.rank, other) if sends else (other, trace.rank)
                number = counts[sends, what, *ends]
                counts[sends, what, *ends] += 1
                yield {
                    "ph": "s" if sends else "f",
                    **({} if sends else {"bp": "e"}),
                    "id": f"{event.phase}-{what}-{ends[0]}-{ends[1]}-{number}",
                    "name": what,
                    "cat": event.phase,
                    "pid": trace.rank,
                    "tid": 1,
                    "ts": ((event.start if sends else event.end) - origin) / 1e3,
                    "args": {"microbatch": event.details.get("microbatch")},
                }


def _messages(event: TraceEvent) -> Iterator[tuple[bool, str, int]]:
    """Whether an event sends, what, and to or from which rank; one may do several."""
    details = event.details
    if event.phase == "p2p":
        for what, ends in _MATCHES.items():
            for sends, (size, peer) in zip((True, False), ends, strict=True):
                if details.get(size):
                    yield sends, what, details[peer]
    elif event.phase == "exchange":
        for sends, peer in ((True, "target"), (False, "source")):
            if peer in details:
                yield sends, event.name.rpartition(" ")[2], details[peer]
