"""The benchmark of pixels as bytes: what it reports."""

import json
from pathlib import Path

import pytest
from bench import bench
from typer.testing import CliRunner


@pytest.mark.quick
def test_it_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "pixels.json"
    given = ["pixels", "--height", "64", "--width", "96", "--rounds", "2", "--json", str(path)]
    result = CliRunner().invoke(bench, given, catch_exceptions=False)
    assert result.exit_code == 0
    assert "an image of 96 x 64 pixels" in result.output
    written = json.loads(path.read_text())
    theirs, ours = written["by_transformers"], written["as_bytes"]
    assert theirs["nbytes"] == 8 * ours["nbytes"] == 24 * 1536 * 4
    assert len(theirs["made"]) == len(ours["made"]) == len(ours["decoded"]) == 2
    assert theirs["decoded"] == []
