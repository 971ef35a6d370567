"""The files that a microbatch and a feature pass, found by tiny runs, as the docs show them.

``PYTHONPATH=tests python -m pages.ways docs/architecture.md`` writes them there; without a file
they are printed.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType

from loongplug.verify.forked_runs import preload
from loongplug.verify.ranks import OnEvent, join, run_ranks
from loongplug.verify.tiny_processor import write_processor
from loongplug.verify.tiny_rows import write_rows
from pages.commands import ROOT
from pages.marked import write

Files = tuple[str, ...]  # below loongplug, in the order in which they are first passed

_PACKAGE = ROOT / "loongplug"
_BEGINNING = f"{_PACKAGE}/"  # of a path within it
_IN_A_LINE = 3  # files in a line of a box
_MINUTES = 2.0
_TINY = (
    *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
    *("--seq-length", "160", "--micro-batch-size", "1", "--global-batch-size", "2"),
    *("--lr", "1e-3", "--train-iters", "1", "--log-interval", "1", "--eval-iters", "0"),
)
_PLANNED = ("--enable-full-hetero-dp",)


@dataclass(frozen=True, kw_only=True)
class Way:
    """What ``runs``, by column with their flags, pass between two functions of loongplug.

    From the first call of ``begin`` to the first end of ``end``, each ``file:function``. The page
    draws the run ``drawn``, and has the way between the marks of ``name``.
    """

    name: str
    begin: str
    end: str
    runs: Mapping[str, tuple[str, ...]]
    drawn: str


MICROBATCH = Way(
    name="way of a microbatch",
    begin="data/loader.py:MicrobatchLoader.__next__",
    end="training/forward_step.py:token_loss",
    runs={"padded rows": (), "packs": ("--packing", "--bad-sample", "skip")},
    drawn="padded rows",
)
FEATURE = Way(
    name="way of a feature",
    begin="models/multimodal.py:MultimodalModel._encoded",
    end="models/features.py:place",
    runs={"uniform": (), "full separation": _PLANNED},
    drawn="full separation",
)
WAYS = (MICROBATCH, FEATURE)


class _Trace:
    """Looks on at calls of functions of loongplug, in all threads, between a way's ends."""

    def __init__(self, way: Way) -> None:
        self.files: list[str] = []
        self._begin, self._end = way.begin, way.end
        self._begun = False

    def start(self) -> None:
        """From now on, until the way's end."""
        tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
        sys.monitoring.use_tool_id(tool, "pages.ways")
        sys.monitoring.register_callback(tool, events.PY_START, self._entered)
        sys.monitoring.register_callback(tool, events.PY_RETURN, self._left)
        sys.monitoring.set_events(tool, events.PY_START | events.PY_RETURN)

    def _entered(self, code: CodeType, _: int) -> object:
        file = _below_package(code)
        if file is None or code.co_name == "<module>":
            return sys.monitoring.DISABLE  # an import is no use
        self._begun |= f"{file}:{code.co_qualname}" == self._begin
        if self._begun and file not in self.files:
            self.files.append(file)
        return None

    def _left(self, code: CodeType, *_: object) -> object:
        file = _below_package(code)
        if f"{file}:{code.co_qualname}" != self._end:
            return sys.monitoring.DISABLE
        if self._begun:
            sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
        return None


def _below_package(code: CodeType) -> str | None:
    """Where in loongplug a function is from; None for another package's. Asked at every call."""
    file = code.co_filename
    return file[len(_BEGINNING) :] if file.startswith(_BEGINNING) else None


def _traced(rank: int, _: OnEvent, *, flags: Sequence[str], way: Way, folder: Path) -> Files:
    """A run of one rank, in its own process."""
    join(rank, folder=folder, device="cpu", minutes=_MINUTES)
    from loongplug.training.run import run

    trace = _Trace(way)
    trace.start()
    run(flags)
    return tuple(trace.files)


def passed(way: Way, *, demo: Path) -> dict[str, Files]:
    """By column, what each of a way's runs passes, on the demo data of a folder."""
    data = (
        *("--tokenizer-model", str(demo / "processor")),
        *("--train-data-path", str(demo / "train.jsonl")),
    )
    found = {}
    for column, flags in way.runs.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # No run finds an index that another one made.
            all_flags = (*_TINY, *data, *flags, "--index-dir", name)
            run = partial(_traced, flags=all_flags, way=way, folder=folder)
            (found[column],) = run_ranks(run, 1, folder=folder, timeout=60 * _MINUTES)
    return found


def markdown(found: Mapping[str, Files], *, drawn: str) -> str:
    """How many files each run passes, and which ones ``drawn`` does not; a drawing of this one."""
    return "\n".join([*_counts(found, drawn), "", *_drawing(found[drawn])])


def _counts(found: Mapping[str, Files], drawn: str) -> Iterator[str]:
    yield "| run | files outside `models` | within | not in the drawing |"
    yield "| --- | ---: | ---: | --- |"
    for column, files in found.items():
        within = sum(file.startswith("models/") for file in files)
        others = ", ".join(f"`{file}`" for file in files if file not in found[drawn])
        yield f"| {column} | {len(files) - within} | {within} | {others} |"


def _drawing(files: Files) -> Iterator[str]:
    """A box for each room, in the order in which they are first passed, and so its files."""
    yield "```mermaid"
    yield "flowchart TB"
    boxes: dict[str, list[str]] = {}
    for file in files:
        room, _, name = file.partition("/")
        boxes.setdefault(room, []).append(name)
    for number, (room, names) in enumerate(boxes.items()):
        lines = [
            ", ".join(names[start : start + _IN_A_LINE])
            for start in range(0, len(names), _IN_A_LINE)
        ]
        arrow = f"box{number - 1} --> " if number else ""
        yield f'    {arrow}box{number}["<b>{room}</b><br/>{"<br/>".join(lines)}"]'
    yield "```"


def all_ways(folder: Path) -> dict[str, dict[str, Files]]:
    """What the runs of all ways pass, by the way's name; their data are written to ``folder``."""
    write_rows(folder, samples=16)
    write_processor(folder / "processor")
    return {way.name: passed(way, demo=folder) for way in WAYS}


def parts(found: Mapping[str, Mapping[str, Files]]) -> dict[str, str]:
    """The page's part of each way, by the way's name."""
    return {way.name: markdown(found[way.name], drawn=way.drawn) for way in WAYS}


if __name__ == "__main__":
    preload("cpu")
    with tempfile.TemporaryDirectory() as name:
        write(sys.argv[1:], parts(all_ways(Path(name))))
