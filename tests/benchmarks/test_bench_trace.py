"""The bench of --trace runs the same training on both sides."""

import json

import pytest
from micro.trace import TraceCost, bench_trace, event_seconds


@pytest.mark.quick
def test_the_ratio_is_traced_over_plain():
    cost = TraceCost(
        plain_seconds=(1.0, 2.0, 9.0),
        traced_seconds=(3.0, 3.0, 1.0),
        events_per_step=40.0,
        bytes_per_step=1.0,
        event_seconds=0.001,
    )
    assert cost.ratio == 1.5
    assert cost.share == pytest.approx(0.02)
    assert 0 < event_seconds(events=100) < 0.001


@pytest.mark.slow
@pytest.mark.sweep  # whole runs of a bench
@pytest.mark.sweep
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
