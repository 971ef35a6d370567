"""``python benchmarks/bench.py``: what reaches the measurements."""

from pathlib import Path
from typing import Any

import pytest
from bench import bench
from typer.testing import CliRunner

pytestmark = pytest.mark.quick


def test_each_measurement_has_a_command() -> None:
    printed = CliRunner().invoke(bench, ["--help"]).output
    for name in ("attention", "convert", "data", "experts", "memory", "packing", "switch", "trace"):
        assert name in printed


def test_options_reach_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("micro.attention.run", lambda **options: calls.append(options))
    given = ["attention", "--heads", "2", "--threads", "1", "--json", "j"]
    assert CliRunner().invoke(bench, given).exit_code == 0
    assert calls == [
        {
            "sequence_length": 2048,
            "heads": 2,
            "head_dim": 64,
            "rounds": 9,
            "threads": 1,
            "json_path": Path("j"),
        }
    ]
