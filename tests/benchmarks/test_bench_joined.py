"""The benchmark of joined units: what it reports, and that both sides are the same gradients."""

import json
from pathlib import Path

from bench import bench
from ranks import run_ranks
from typer.testing import CliRunner


def _by_command(rank: int, path: str) -> str:
    given = ["joined", "--units", "3", "--side", "4", "--rounds", "2", "--json", path]
    result = CliRunner().invoke(bench, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "joined.json"
    (printed,) = run_ranks(_by_command, 1, path=str(path))
    assert "3 units of 16 patches" in printed
    written = json.loads(path.read_text())
    assert (written["units"], written["patches"]) == (3, 16)
    for side in ("singly", "joined"):
        assert len(written[side]["clock"]) == len(written[side]["processor"]) == 2
    assert 0 < written["apart"] < 1e-5  # another order of sums, and no other gradient
