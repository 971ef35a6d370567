"""The benchmark of packs planned from an index: what it prints and writes, and who reads less."""

import json
from pathlib import Path

import pytest
from micro.indexed import run

pytestmark = pytest.mark.quick


def test_a_rank_with_an_index_makes_its_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    figures = run(samples=64, dp_size=8, seq_length=128, rounds=2, json_path=path)
    printed = capsys.readouterr().out
    assert "64 samples, one rank of DP 8" in printed
    assert json.loads(path.read_text())["indexed"] == list(figures.indexed)
    assert max(figures.indexed) < min(figures.without)
