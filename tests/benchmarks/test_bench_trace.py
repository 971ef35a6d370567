"""The bench of --trace runs the same training on both sides."""

import json

import pytest
from micro.trace import bench_trace


@pytest.mark.slow
@pytest.mark.sweep  # whole runs of a bench
def test_both_sides_are_measured(flags, tmp_path, capsys):
    more = ("--pipeline-model-parallel-size", "2")
    cost = bench_trace(
        [*flags, *more],
        ranks=2,
        warmup=1,
        steps=2,
        rounds=1,
        json_path=tmp_path / "trace.json",
    )
    assert len(cost.plain_seconds) == len(cost.traced_seconds) == 2
    assert 20 < cost.events_per_step < 200
    assert cost.bytes_per_step > 50 * cost.events_per_step
    assert "ratio of the medians" in capsys.readouterr().out
    assert json.loads((tmp_path / "trace.json").read_text())["events_per_step"] > 0
