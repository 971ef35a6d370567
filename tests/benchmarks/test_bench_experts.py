"""``benchmarks/bench.py experts``: who takes a turn when, and that all ways are the same step."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from micro.experts import JOINED, KERNEL, ONE_BY_ONE, WAYS, WORK, _Ways, run

from loongplug.models.layers import mlp


@pytest.mark.quick
def test_a_way_is_how_layers_compute_from_then_on() -> None:
    layer = SimpleNamespace(joined=True)
    before = mlp.kernel_takes
    with _Ways() as ways:
        ways._layers = [layer]
        for way, joined, kernel in (
            (ONE_BY_ONE, False, False),
            (KERNEL, True, True),
            (JOINED, True, False),
        ):
            ways.take(way)
            assert (layer.joined, mlp.kernel_takes([], None)) == (joined, kernel)
    assert mlp.kernel_takes is before


@pytest.mark.slow
@pytest.mark.sweep  # whole runs of a bench
def test_all_ways_are_the_same_step(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    work = replace(WORK, micro_batch_size=1, microbatches=2)
    figures = run(flags=(), steps=1, json_path=path, work=work)
    assert figures.apart < 1e-5
    written = json.loads(path.read_text())
    assert list(written["ways"]) == list(WAYS)
    assert all(len(each["processor"]) == 1 for each in written["ways"].values())
