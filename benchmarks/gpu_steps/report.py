"""What the driver leaves: ``first_gpu.json`` and ``first_gpu.md``, whole after every step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpu_steps.rows import Figure, Row
from loongplug.output_files import put_whole

type Outcome = Literal["done", "failed", "ended at its limit"]

NAME = "first_gpu"
_LEGEND = (
    "Tokens are counted before padding. MFU is the share of step 0's product. Times are medians;"
    " peaks are those of torch's allocator, on the CPU those of the process."
)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step: how it ended, what it measured, and, where it did not end well, its last words."""

    number: int
    title: str
    outcome: Outcome
    seconds: float
    limit_seconds: float
    rows: Sequence[Row]
    said_last: Sequence[str] = ()


@dataclass
class Report:
    """Steps as they end. ``setting`` says where and with which sizes they were run.

    Steps that an earlier run in the same setting has left in the folder stay, unless they are run
    again.
    """

    folder: Path
    setting: Mapping[str, Any]
    steps: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read what is there."""
        path = self.folder / f"{NAME}.json"
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if content.get("setting") == dict(self.setting):
            self.steps += [
                StepRecord(**{**step, "rows": [Row(**row) for row in step["rows"]]})
                for step in content["steps"]
            ]

    def add(self, step: StepRecord) -> None:
        """Take a step in and write both files again, each in one piece."""
        others = [each for each in self.steps if each.number != step.number]
        self.steps = sorted([*others, step], key=lambda each: each.number)
        content = {"setting": dict(self.setting), "steps": [asdict(each) for each in self.steps]}
        with put_whole(self.folder / f"{NAME}.json") as whole:
            whole.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        part = self.folder / f".{NAME}.md.part"
        part.write_text(self.markdown(), encoding="utf-8")
        part.replace(self.folder / f"{NAME}.md")

    def markdown(self) -> str:
        """A table of the steps, then one for each."""
        parts = ["# The first run on a GPU", _setting(self.setting), _overview(self.steps)]
        parts.append(_LEGEND)
        parts += [_section(step) for step in self.steps]
        return "\n\n".join(parts) + "\n"


def _setting(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in setting.items())


def _overview(steps: Sequence[StepRecord]) -> str:
    lines = [
        _line([step.number, step.title, step.outcome, f"{step.seconds:.1f}", step.limit_seconds])
        for step in steps
    ]
    head = ["step", "what", "outcome", "s", "limit, s"]
    return "\n".join([_line(head), _line(["---"] * len(head)), *lines])


def _section(step: StepRecord) -> str:
    parts = [f"## {step.number}. {step.title}"]
    measured = [row for row in step.rows if row.reason is None]
    # Rows with the same figures are one table.
    for group in _groups(measured):
        names = list(group[0].figures)
        head = ["case", *names]
        lines = [_line([row.case, *(_shown(row.figures[name]) for name in names)]) for row in group]
        parts.append("\n".join([_line(head), _line(["---"] * len(head)), *lines]))
    missing = [row for row in step.rows if row.reason is not None]
    if missing:
        lines = [_line([row.case, row.reason]) for row in missing]
        parts.append("\n".join([_line(["not measured", "reason"]), "| --- | --- |", *lines]))
    if step.said_last:
        parts.append("Said last:\n\n```\n" + "\n".join(step.said_last) + "\n```")
    return "\n\n".join(parts)


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.figures), []).append(row)
    return list(groups.values())


def _shown(value: Figure) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int):
        return f"{value:,}" if isinstance(value, int) else value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(cells: Sequence[object]) -> str:
    texts = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(texts)} |"
