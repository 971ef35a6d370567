"""The packing benchmark: the target's floor, and what it prints and writes."""

import json

import pytest
from micro.packing import run

pytestmark = pytest.mark.quick


def test_it_is_fast_and_full_and_says_so(tmp_path, capsys):
    path = tmp_path / "packing.json"
    figures = run(samples=100_000, seq_length=8192, look_ahead=256, json_path=path)
    assert figures.seconds < 2
    assert figures.fill_rate > 0.98
    assert figures.padded_fill_rate < 0.2
    printed = capsys.readouterr().out
    assert f"planned in {figures.seconds:.2f} s" in printed
    assert f"{figures.fill_rate:.1%}" in printed
    written = json.loads(path.read_text())
    assert written["packs"] == figures.packs
    assert written["fill_rate"] == figures.fill_rate
