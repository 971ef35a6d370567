"""The step benchmark runs the real training, and its comparison does the same work twice."""

import json

import pytest
from digits.make import make_demo_data
from micro.against_transformers import compare, training_flags

from loongplug.bench.step import StepFigures, bench_step, spread

FIGURES = StepFigures(
    ranks=1,
    warmup=1,
    step_seconds=(0.5, 2.0),
    step_tokens=(100, 100),
    losses=(3.0, 2.0, 1.0),
    peak_memory_bytes=(1024,),
)


@pytest.mark.quick
def test_rates_are_those_of_the_measured_steps():
    assert FIGURES.tokens_per_second == (200.0, 50.0)
    assert spread(FIGURES.tokens_per_second, form=".0f") == "125 (50 to 200)"


@pytest.mark.quick
@pytest.mark.parametrize(
    "flag",
    ["--save", "--save-hf=out", "--save-lora", "--metrics-json", "--tensorboard-dir", "--trace"],
)
def test_a_flag_that_writes_is_refused_before_the_run(monkeypatch, flag):
    monkeypatch.setattr("loongplug.bench.step.measure_step", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(ValueError, match=f"{flag}: a measured run .* keeps nothing"):
        bench_step(["--lr", "1", flag, "x"], ranks=1, warmup=1, steps=1, json_path=None)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    make_demo_data(folder, train=64, test=8)
    return folder


@pytest.mark.slow
def test_bench_step_measures_two_ranks(demo, tmp_path, capsys):
    flags = [*training_flags(demo, "qwen3_vl_tiny"), "--tensor-model-parallel-size", "2"]
    figures = bench_step(flags, ranks=2, warmup=1, steps=2, json_path=tmp_path / "step.json")
    assert len(figures.step_seconds) == 2
    assert len(figures.losses) == 3
    assert len(figures.peak_memory_bytes) == 2
    assert min(figures.peak_memory_bytes) > 50 * 2**20  # torch alone takes more
    assert "tokens/s" in capsys.readouterr().out
    assert json.loads((tmp_path / "step.json").read_text())["ranks"] == 2


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("model", ["qwen3_vl_tiny", "llava_tiny"])
def test_both_sides_of_the_comparison_do_the_same_work(demo, model):
    comparison = compare(demo, model=model, rounds=1, steps=2, threads=1)
    assert comparison.largest_loss_difference < 1e-5
    assert comparison.ratio > 0
