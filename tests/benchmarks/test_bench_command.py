"""``python benchmarks/bench.py``: what reaches the measurements."""

from pathlib import Path

import pytest
from bench import bench
from typer.testing import CliRunner

pytestmark = pytest.mark.quick


def test_each_measurement_has_a_command() -> None:
    printed = CliRunner().invoke(bench, ["--help"]).output
    for name in ("attention", "convert", "data", "experts", "memory", "packing", "switch", "trace"):
        assert name in printed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("levels --rounds 0", "--rounds is 0"),
        ("context --rounds 0", "--rounds is 0"),
        ("pipeline --steps 0", "--steps is 0"),
        ("switch --switches 99", "error: --switches is 99: expected at least 100."),
    ],
)
def test_too_few_are_refused(given: str, said: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        result = CliRunner().invoke(bench, given.split())
    assert result.exit_code == 1
    assert said in result.output
