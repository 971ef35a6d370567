"""The JSON file in which runs and evaluations leave their figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> dict[str, Any]:
    """The metrics that ``path`` already has; none when there is no file.

    Raises:
        ValueError: there is something else in the file.
    """
    if not path.is_file():
        return {}
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): give another file.") from error
    if not isinstance(metrics, dict):
        raise ValueError(f"{path} has no JSON object in it: give another file.")
    return metrics


def merge_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write ``metrics`` into ``path``, beside what else it has, in one piece."""
    write_metrics(path, read_metrics(path) | dict(metrics))


def write_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write ``metrics`` to ``path`` in one piece; what else it had gives way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(dict(metrics), indent=2) + "\n", encoding="utf-8")
    part.replace(path)
